"""Runs that may be compared: each difference is an error with its name, and the tuples list the exceptions."""

from __future__ import annotations

from dataclasses import replace

import pytest
from bench_cases import changed, full_steps
from switch_bench.compare import cautions, pairs_of, refuse_unlike
from switch_bench.record import BASELINE, RL_KERNEL, Switch


def configured(section: str, name: str, value):
    def change(repeat):
        repeat.config[section][name] = value
        return repeat

    return change


def placed(*path, value):
    """Returns a change of the environment."""

    def change(repeat):
        at = repeat.environment
        for key in path[:-1]:
            at = at[key]
        at[path[-1]] = value
        return repeat

    return change


def compare(record) -> None:
    refuse_unlike(record.name, record.switch, pairs_of(record)[0])


def refusal(record) -> str:
    with pytest.raises(ValueError, match="must differ in") as caught:
        compare(record)
    return str(caught.value)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (configured("train", "lr", 2e-6), "train.lr: 1e-06 in baseline-0, 2e-06 in rl_kernel-1"),
        (configured("train", "seed", 7), "train.seed: 1234 in baseline-1, 7 in rl_kernel-1"),
        (configured("train", "more", 1), "train.more: (absent) in baseline-0, 1 in rl_kernel-1"),
        (
            configured("logging", "dump_details", "/runs/shared"),
            "logging.dump_details: '<run_dir>/details' in baseline-0, '/runs/shared' in rl_kernel-1",
        ),
        (configured("kernels", "rlk_fast", "strict"), "rlk_fast: 'strict' in rl_kernel-1, 'auto' is the"),
        (
            configured("kernels", "rl_kernel_ops", ["logp"]),
            "rl_kernel_ops: ['logp', 'grpo_loss'] in baseline-0",
        ),
        (placed("gpus", 0, value={"name": "H100"}), "gpus.0.name: 'NVIDIA H200' in baseline-0, 'H100'"),
        (
            placed("gpus", 1, "driver", value="575"),
            "gpus.1.driver: '580.1' in baseline-0, '575' in rl_kernel-1",
        ),
        (
            placed("packages", "torch", value="2.8"),
            "packages.torch: '2.9.0' in baseline-0, '2.8' in rl_kernel-1",
        ),
        (placed("git", "commit", value="fedc"), "git.commit: '0123456789abcdef' in baseline-0, 'fedc'"),
        (placed("cpu", "usable_cores", value=2), "cpu.usable_cores: 64 in baseline-0, 2"),
        (
            placed("variables", "NCCL_DEBUG", value="INFO"),
            "variables.NCCL_DEBUG: (absent) in baseline-0, 'INFO'",
        ),
        (
            lambda repeat: replace(repeat, environment={}),
            "no environment (hardware, versions) of rl_kernel-1",
        ),
    ],
)
def test_any_other_difference_is_refused_by_name(change, told):
    record = changed(full_steps(repeats=2, steps=4), RL_KERNEL, 1, change)
    assert told in refusal(record)


def test_every_difference_is_listed_at_once():
    record = changed(full_steps(repeats=2, steps=4), RL_KERNEL, 0, configured("train", "lr", 1.0))
    text = refusal(changed(record, BASELINE, 1, placed("gpus", 0, "driver", value="1")))
    assert "train.lr" in text and "gpus.0.driver" in text
    assert text.startswith("qwen3-4b-grpo: runs must differ in rlk_fast alone")


def test_a_switch_that_switches_nothing_or_is_not_known_is_refused():
    record = full_steps(repeats=1, steps=4)
    same, unknown = Switch("rlk_fast", "off", "off"), Switch("no_such", "off", "auto")
    assert "rlk_fast: 'off' on both sides" in refusal(replace(record, switch=same))
    assert "no_such: (absent) in baseline-0" in refusal(replace(record, switch=unknown))
    sides = {side: [replace(repeats[0], config={})] for side, repeats in record.sides.items()}
    assert "no configuration at all" in refusal(replace(record, sides=sides))


def test_what_is_excepted_and_no_more():
    record = full_steps(repeats=2, steps=4)
    compare(record)
    runs = record.sides[BASELINE] + record.sides[RL_KERNEL]
    assert len({run.config["logging"]["run_dir"] for run in runs}) == 4, "paths differ already"
    for change in (
        placed("time", value="later"),
        placed("command", value=["other"]),
        placed("host", "name", value="host-b"),
        placed("variables", "VIME_RL_KERNEL", value="1"),
        configured("weight_update", "weight_dir", "/other"),
    ):
        compare(changed(record, RL_KERNEL, 1, change))
    seeded = changed(record, BASELINE, 1, configured("train", "seed", 9))
    assert "train.seed" in refusal(seeded)
    compare(changed(seeded, RL_KERNEL, 1, configured("train", "seed", 9)))  # a pair with its own seed


def test_runs_that_cannot_count_are_named_and_their_partners_with_them():
    """The runner writes the record after each run, so a missing run has no configuration and no environment."""
    record = full_steps(repeats=4, steps=4)
    record = changed(record, RL_KERNEL, 0, lambda r: replace(r, finished=False, steps=r.steps[:2]))
    record = changed(record, BASELINE, 2, placed("gpus", value=None))
    not_begun = {"finished": False, "steps": [], "config": {}, "environment": {}}
    record = changed(record, RL_KERNEL, 3, lambda r: replace(r, **not_begun))
    compare(record)
    pairs, left_out = pairs_of(record)
    assert [[repeat.run for repeat in pair] for pair in pairs] == [["baseline-1", "rl_kernel-1"]]
    assert left_out == [
        "rl_kernel-0 did not finish (2 steps): the pair baseline-0, rl_kernel-0 does not count",
        "baseline-2 does not say on which GPUs it ran (nvidia-smi did not answer): "
        "the pair baseline-2, rl_kernel-2 does not count",
        "rl_kernel-3 did not finish (0 steps): the pair baseline-3, rl_kernel-3 does not count",
    ]


def test_repeats_pair_by_their_number_whenever_they_ran():
    """rl_kernel-0 was repeated after all others. Its partner is still the run with its seeds."""
    record = full_steps(repeats=2, steps=4)
    record = changed(record, RL_KERNEL, 0, lambda r: replace(r, order=4))
    pairs, _ = pairs_of(record)
    assert [b.run for _, b in pairs] == ["rl_kernel-0", "rl_kernel-1"]
    assert "Other runs were between baseline-0 and rl_kernel-0: what drifted" in told(record)


def test_no_pair_at_all_is_refused():
    record = changed(full_steps(repeats=1, steps=4), BASELINE, 0, lambda r: replace(r, finished=False))
    with pytest.raises(ValueError, match="one pair of finished runs, got none: baseline-0 did not finish"):
        pairs_of(record)


def told(record) -> str:
    return " ".join(cautions(record, pairs_of(record)[0]))


def test_what_has_to_be_known_is_said():
    record = full_steps(repeats=2, steps=4)
    assert told(record).startswith("baseline ran first in every pair") and "No kernel ran" not in told(record)
    switch = Switch("rl_kernel_ops", ["swiglu"], ["swiglu", "logp", "ratio_kl"])
    assert "Switched and never called: logp, ratio_kl." in told(replace(record, switch=switch))
    for step in record.sides[RL_KERNEL][0].steps:
        step["rl_kernel/logp/calls"] = 2.0
    assert "Switched and never called: ratio_kl." in told(replace(record, switch=switch))
    moved = changed(record, BASELINE, 1, placed("host", "name", value="host-b"))
    assert "several hosts of the same kind: host-a, host-b" in told(moved)
    assert "in no commit" in told(changed(record, BASELINE, 0, placed("git", "modified", value=True)))
    assert "Which commit" in told(changed(record, BASELINE, 0, placed("git", value=None)))
    fell = changed(record, RL_KERNEL, 1, lambda r: replace(r, fallbacks={"logp": 3, "ratio_kl": 0}))
    assert "ran no kernel: logp (3 calls) fell back" in told(fell)


def test_operators_that_fell_back_in_every_call_ran_no_kernel():
    """Other operators ran a kernel, but both sides have them."""
    record = full_steps(repeats=1, steps=4)
    record = replace(record, switch=Switch("rl_kernel_ops", ["swiglu"], ["swiglu", "logp"]))
    nothing = "No kernel ran in rl_kernel that baseline did not run: nothing here is about kernels."
    assert nothing in told(record), "nobody called logp"
    for step in record.sides[RL_KERNEL][0].steps:
        step.update({"rl_kernel/logp/calls": 2.0, "rl_kernel/logp/fallbacks": 2.0, "rl_kernel/fast": 0.5})
    assert nothing in told(record)
    record.sides[RL_KERNEL][0].steps[2]["rl_kernel/logp/fallbacks"] = 1.0
    assert nothing not in told(record)
    for step in record.sides[RL_KERNEL][0].steps:
        step["rl_kernel/fast"] = 0.0
    assert nothing in told(record)
