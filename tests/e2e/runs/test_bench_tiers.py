"""Tests `vime bench` on the tiny pair of examples/bench: one real run per side in both tiers, and the records that
they write."""

from __future__ import annotations

import re
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from switch_bench.record import BASELINE, RL_KERNEL, Record, Repeat, Switch, all_repeats, read
from train_fixtures import ROOT, launched, run, vime

from vime.view.measures import METRICS
from vime.view.run_metrics import load_run, step_times

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

CONFIG = ROOT / "examples" / "bench" / "tiny-cpu.yaml"
STEPS = 3
PARTS = ("log_probs", "ref_log_probs", "forward", "policy_loss", "backward", "optimizer")
SAME = ("train/loss", "train/grad_norm", "train/train_rollout_logprob_abs_diff")


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """Yields a folder with a short path, because paths of Unix sockets have a limit."""
    root = Path(tempfile.mkdtemp(prefix="vime-bench-"))
    yield root
    shutil.rmtree(root, ignore_errors=True)


def bench(tier: str, folder: Path, *more: str) -> list[str]:
    return vime("bench", tier, str(CONFIG), "--repeats", "1", "--out", str(folder / tier), *more)


@pytest.fixture(scope="module")
def module(folder: Path) -> Record:
    printed = run(bench("module", folder), folder / "module.out", timeout_s=300)
    assert "[3/3] rl_kernel-0: done in" in printed
    return read(folder / "module")


def pair(record: Record) -> tuple[Repeat, Repeat]:
    """Checks the facts that hold in every tier, and returns the two runs."""
    assert [repeat.run for repeat in all_repeats(record)] == ["runs/baseline-0", "runs/rl_kernel-0"]
    assert record.switch == Switch("rlk_fast", "off", "auto")
    (baseline,), (fast,) = record.sides[BASELINE], record.sides[RL_KERNEL]
    for repeat, mode in ((baseline, "off"), (fast, "auto")):
        assert repeat.finished and len(repeat.steps) == STEPS
        assert repeat.config["kernels"]["rlk_fast"] == mode
        assert repeat.environment["packages"]["torch"]
        for step in repeat.steps:
            assert {
                f"perf/{part}_time" for part in (*PARTS, "step", "actor_train")
            } <= step.keys() & METRICS.keys()
            assert all(step[f"perf/{part}_time"] > 0 for part in PARTS)
            assert step["train/ppo_kl"] != 0 and step["train/kl_loss"] > 0, (
                "of the second of two optimizer steps"
            )
    assert baseline.fallbacks == {} and {"linear_token_loss", "grpo_loss"} <= fast.fallbacks.keys()
    return baseline, fast


def test_module_trains_both_sides_on_the_same_rollouts(folder: Path, module: Record) -> None:
    baseline, fast = pair(module)
    for ours, theirs in zip(fast.steps, baseline.steps, strict=True):
        for name in SAME:  # both sides compute the same number in fp32
            assert ours[name] == pytest.approx(theirs[name], rel=1e-3, abs=1e-6), name
    assert fast.steps[0]["train/train_rollout_logprob_abs_diff"] < 1e-5 < fast.steps[1][SAME[2]]
    assert fast.steps[0]["train/grad_norm"] > 0
    assert not {"perf/rollout_time", "perf/update_weights_time"} & fast.steps[0].keys(), "no engine was there"
    assert not {"rollout/raw_reward", "rollout/response_len/mean"} & fast.steps[0].keys(), (
        "they are the file's"
    )
    assert sorted(path.name for path in (folder / "module" / "rollouts").iterdir()) == [
        "0.pt",
        "1.pt",
        "2.pt",
    ]
    assert any(note.startswith("random weights of the shape of qwen3-tiny") for note in module.notes)


def test_a_second_call_keeps_what_is_whole(folder: Path, module: Record) -> None:
    printed = run(bench("module", folder), folder / "again.out", timeout_s=60)
    assert [
        f"{name}: kept, {STEPS} steps" in printed for name in ("rollouts", "baseline-0", "rl_kernel-0")
    ] == [True] * 3
    assert read(folder / "module") == module


def test_whole_steps_after_an_interruption(folder: Path, module: Record) -> None:
    model = folder / "module" / "model-qwen3-tiny"
    command = bench("e2e", folder, "--model", str(model))
    with launched(command, folder / "stopped.out") as launch:
        started = folder / "e2e" / "runs" / "baseline-0" / "logs" / "engine-0.log"
        launch.wait_for(started.exists, "engine that starts", 90)
        launch.process.send_signal(signal.SIGTERM)
        assert launch.finish(120) == 143, launch.output
        assert "interrupted: what was started has been stopped" in launch.output
    assert "baseline-0 was stopped after 0 of 3 steps" in read(folder / "e2e").notes

    run(command, folder / "e2e.out", timeout_s=300)
    record = read(folder / "e2e")
    for repeat in pair(record):
        for step in repeat.steps:
            assert step["perf/rollout_time"] > 0 and step["perf/update_weights_time"] > 0
            assert step["train/train_rollout_logprob_abs_diff"] < 1e-5
        assert repeat.steps[0]["rollout/raw_reward"] == pytest.approx(0.5, abs=0.15)
        assert step_times(load_run(folder / "e2e" / repeat.run)) is not None
    baseline, fast = pair(record)
    assert fast.steps[0]["rollout/raw_reward"] == baseline.steps[0]["rollout/raw_reward"]
    assert fast.steps[0]["train/grad_norm"] == pytest.approx(baseline.steps[0]["train/grad_norm"], rel=1e-3)
    assert record.notes[0] == module.notes[0]  # the note on random weights is the same in both tiers
    assert "runs/unfinished/baseline-0.1 is an attempt that did not finish and was begun anew" in record.notes
    read_report(folder)


def read_report(folder: Path) -> None:
    """One page covers both tiers. It gives no verdict, because two pairs are too few, and has their numbers and
    pictures."""
    run(
        vime(
            "bench",
            "report",
            *(str(folder / tier) for tier in ("module", "e2e")),
            "--out",
            str(folder / "page"),
        ),
        folder / "report.out",
    )
    page = (folder / "page" / "report.md").read_text()
    assert page.index("## Modules") < page.index("## Full steps")
    assert "fewer than 3 pairs, no verdict" in page
    pictures = re.findall(r"\]\((\S+\.png)\)", page)
    both = {"differences", "mean_step_time", "step_time", "time_breakdown", "logprob_diff"}
    assert {re.sub(r"-tiny-cpu-|\.png", " ", name) for name in pictures} == {
        f"{tier} {picture} "
        for tier, drawn in (("1-module", both), ("2-e2e", {*both, "raw_reward"}))
        for picture in drawn
    }
    assert all((folder / "page" / name).stat().st_size > 5000 for name in pictures)
    assert "No kernel ran in rl_kernel that baseline did not run" in page
