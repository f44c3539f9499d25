"""A run that is lost between a checkpoint and its log line: the next one logs it."""

from __future__ import annotations

import io
from pathlib import Path
from types import SimpleNamespace

from slime.protocols import TrainResult
from slime.tracking.console import StepLine
from slime.tracking.report import Reporter
from slime.tracking.trackers import JsonlTracker, Trackers, read_metric_lines

TRAINED = TrainResult(
    steps=[{"train/loss": 0.5}], rollout={"rollout/returns": 1.0}, perf={"perf/log_probs_time": 2.0}
)


def reporter(path: Path, start: int) -> Reporter:
    config = SimpleNamespace(rollout_batch_size=4, n_samples_per_prompt=2, global_batch_size=8)
    resume = {"rollout/step": start, "train/step": start}
    trackers = Trackers([JsonlTracker(path / "metrics.jsonl", resume)])
    report = Reporter(config, trackers, StepLine(stream=io.StringIO()), path / "metrics.pending.json")
    report.recover(start)
    return report


def lines(path: Path) -> list[tuple[str, int]]:
    file = path / "metrics.jsonl"
    return [(row["step_key"], row["step"]) for _, row in read_metric_lines(file.read_text(), file)]


def test_step_lost_after_its_checkpoint_is_logged_by_the_next_run(tmp_path: Path) -> None:
    report = reporter(tmp_path, 0)
    report.before_save(0, {"rollout/raw_reward": 0.25}, TRAINED)
    report.close()  # killed here: rollout 0 is in the checkpoint, nothing of it in the log
    assert lines(tmp_path) == []
    reporter(tmp_path, 1).close()
    assert lines(tmp_path) == [("rollout/step", 0), ("train/step", 0)]
    reporter(tmp_path, 1).close()
    assert lines(tmp_path) == [("rollout/step", 0), ("train/step", 0)]


def test_step_whose_checkpoint_was_not_finished_is_trained_and_logged_again(tmp_path: Path) -> None:
    report = reporter(tmp_path, 0)
    report.before_save(0, {"rollout/raw_reward": 0.25}, TRAINED)
    report.close()
    reporter(tmp_path, 0).close()
    assert lines(tmp_path) == []


def test_step_that_was_logged_leaves_nothing_pending(tmp_path: Path) -> None:
    report = reporter(tmp_path, 0)
    report.before_save(0, {}, TRAINED)
    report.step(0, {}, TRAINED, step_time_s=1.0)
    report.close()
    reporter(tmp_path, 1).close()
    assert lines(tmp_path) == [("rollout/step", 0), ("train/step", 0)]
