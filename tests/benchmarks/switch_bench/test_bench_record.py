"""Tests bench.json: the error for a field that no report could read names the field."""

from __future__ import annotations

import json

import pytest
from bench_cases import full_steps
from switch_bench.record import BASELINE, RECORD_FILE, RL_KERNEL, read


def refusal(tmp_path, change) -> str:
    """Returns the error of `read` for a good record that `change` has damaged."""
    path = full_steps(repeats=2, steps=3).write(tmp_path)
    content = json.loads(path.read_text())
    change(content, content["sides"][BASELINE][0])
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=RECORD_FILE) as refused:
        read(tmp_path)
    return str(refused.value)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda whole, run: run.update(steps=None), "sides.baseline.0.steps: Input should be a valid array"),
        (lambda whole, run: run.update(steps=[3]), "sides.baseline.0.steps.0: Input should be an object"),
        (lambda whole, run: run.update(order="1"), "sides.baseline.0.order: Input should be a valid integer"),
        (lambda whole, run: run.update(finished="no"), "sides.baseline.0.finished: Input should be"),
        (lambda whole, run: run.update(fallbacks=None), "sides.baseline.0.fallbacks: Input should be"),
        (lambda whole, run: run.pop("config"), "sides.baseline.0.config: Field required"),
        (lambda whole, run: run.update(colour=1), "sides.baseline.0.colour: Unexpected"),
        (lambda whole, run: whole.update(switch=None), "switch: Input should be an object"),
        (lambda whole, run: whole["switch"].pop(BASELINE), "switch.baseline: Field required"),
        (lambda whole, run: whole.update(warm_up="1"), "warm_up: Input should be a valid integer"),
        (lambda whole, run: whole.update(warm_up=-1), "warm_up must be 0 steps or more, got -1"),
        (lambda whole, run: whole.update(tier="op"), "tier must be one of module, e2e, got 'op'"),
        (lambda whole, run: whole["sides"].pop(RL_KERNEL), "sides must be baseline and rl_kernel"),
        (lambda whole, run: whole["sides"][RL_KERNEL].pop(), "got {'baseline': 2, 'rl_kernel': 1}"),
        (
            lambda whole, run: run["steps"].pop(),
            "must have one number of steps, above warm_up (1), got {2, 3}",
        ),
        (lambda whole, run: whole.update(warm_up=3), "must have one number of steps, above warm_up (3)"),
        (lambda whole, run: run.update(order=1), "order of its own, got [1, 1, 2, 3]"),
    ],
)
def test_a_field_that_is_wrong_is_named(tmp_path, change, named):
    assert named in refusal(tmp_path, change)


@pytest.mark.parametrize(
    ("metric", "value"),
    [
        ("perf/step_time", 0.0),
        ("perf/step_time", -1.0),
        ("perf/step_time", None),
        ("perf/step_time", True),
        ("perf/step_tokens_per_sec", 0.0),
        ("perf/sleep_time", -0.1),
        ("perf/trainer_peak_gib", -1.0),
        ("train/grad_norm", float("nan")),
        ("train/loss", float("inf")),
    ],
)
def test_a_value_that_cannot_be_is_named_and_no_zero_on_a_plot(tmp_path, metric, value):
    told = refusal(tmp_path, lambda whole, run: run["steps"][1].update({metric: value}))
    assert metric in told and ("baseline-0, step 1: values must be" in told or "valid number" in told)


def test_what_may_be_zero_or_negative_is_taken(tmp_path):
    record = full_steps(repeats=1, steps=3)
    record.sides[BASELINE][0].steps[1].update({"perf/log_probs_time": 0.0, "train/loss": -1.0})
    record.write(tmp_path)
    assert read(tmp_path) == record
