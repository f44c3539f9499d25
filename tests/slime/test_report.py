"""What the loop reports: which numbers go to the trackers under which step, and the line on the screen."""

from __future__ import annotations

import io
from types import SimpleNamespace

import pytest

from slime.protocols import TrainResult
from slime.tracking.console import StepLine
from slime.tracking.report import Reporter
from slime.tracking.trackers import Trackers


class Recorder:
    """A tracker that keeps what it is given."""

    def __init__(self) -> None:
        self.logged: list[tuple] = []
        self.closed = False

    def log(self, metrics, step, step_key) -> None:
        self.logged.append((step_key, step, dict(metrics)))

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def parts():
    config = SimpleNamespace(num_steps_per_rollout=2)
    recorder, screen = Recorder(), io.StringIO()
    return Reporter(config, Trackers([recorder]), StepLine(total=9, stream=screen)), recorder, screen


def test_a_step(parts):
    """Two optimizer steps a rollout: rollout 3 holds train steps 6 and 7."""
    report, recorder, screen = parts
    with report.timers.measure("train_wait"), report.timers.measure("train"):
        pass
    trained = TrainResult(
        steps=[{"train/loss": 0.5}, {"train/loss": 0.25}],
        rollout={"rollout/advantages": 0.0},
        perf={"perf/actor_train_time": 2.0},
    )
    report.step(3, {"rollout/raw_reward": 0.75}, trained, step_time_s=8.0)
    (key, step, metrics), *train = recorder.logged
    assert (key, step) == ("rollout/step", 3)
    assert metrics["perf/step_time"] == 8.0 and metrics["perf/actor_train_time"] == 2.0
    assert {"perf/train_wait_time", "perf/train_time", "perf/wait_time_ratio"} <= set(metrics)
    assert (metrics["rollout/raw_reward"], metrics["rollout/advantages"], metrics["rollout/step"]) == (
        0.75,
        0,
        3,
    )
    assert train == [
        ("train/step", 6, {"train/loss": 0.5, "train/step": 6}),
        ("train/step", 7, {"train/loss": 0.25, "train/step": 7}),
    ]
    line = screen.getvalue().splitlines()[-1]
    assert line.split()[:2] == ["3/9", "0.750"] and "2.5e-01" in line  # the last step's loss
    report.step(4, {}, trained, step_time_s=1.0)
    assert "perf/train_wait_time" not in recorder.logged[3][2]  # timers start anew with each step


def test_rollout_alone_and_evaluation(parts):
    report, recorder, screen = parts
    report.rollout(2, {"rollout/raw_reward": 1.0})
    report.evaluation(5, {"eval/gsm8k": 0.5})
    report.evaluation(6, {})  # the hook has logged it
    assert recorder.logged == [
        ("rollout/step", 2, {"rollout/raw_reward": 1.0, "rollout/step": 2}),
        ("eval/step", 5, {"eval/gsm8k": 0.5}),
    ]
    assert "eval at step 5:  gsm8k 0.5" in screen.getvalue()
    report.close()
    assert recorder.closed
