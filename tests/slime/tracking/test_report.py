"""Tests the reports of the loop: the numbers that trackers get under each step, and the line on the screen."""

from __future__ import annotations

import io

import pytest

from slime.config import Config
from slime.protocols import Evaluated, Logged, RolloutBatch, TrainResult
from slime.tracking.console import StepLine
from slime.tracking.journal import read_events
from slime.tracking.kinds import STEP_PARTS
from slime.tracking.report import Reporter
from slime.tracking.timers import Timers
from slime.tracking.trackers import Trackers


class Clock:
    """A clock that the test sets."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


class Recorder:
    """A tracker that stores its metrics."""

    def __init__(self) -> None:
        self.logged: list[tuple] = []
        self.closed = None

    def log(self, metrics, step, step_key) -> None:
        self.logged.append((step_key, step, dict(metrics)))

    def close(self, state) -> None:
        self.closed = state


@pytest.fixture
def parts():
    config = Config.from_flat(
        {
            "num_steps_per_rollout": 2,
            "actor_num_gpus_per_node": 2,
            "rollout_num_gpus": 2,
            "profile_steps": "5:6",
        }
    )
    recorder, screen = Recorder(), io.StringIO()
    return Reporter(config, Trackers([recorder]), StepLine(total=9, stream=screen)), recorder, screen


def test_a_step(parts):
    """With two optimizer steps per rollout, rollout 3 has train steps 6 and 7."""
    report, recorder, screen = parts
    clock = Clock()
    report.timers = Timers(clock)
    with report.timers.measure("step"):
        with report.timers.measure("train_wait"):
            clock.now = 4.0
        with report.timers.measure("train"):
            clock.now = 7.5
        clock.now = 8.0
    trained = TrainResult(
        steps=[{"train/loss": 0.5}, {"train/loss": 0.25}],
        rollout={"rollout/advantages": 0.0},
        perf={
            "perf/trainer_time": 2.75,
            "perf/columns_wait_time": 0.25,
            "perf/actor_train_time": 2.0,
            "perf/ref_log_probs_time": 0.5,
        },
    )
    tower = {"log_probs": 1e12, "ref_log_probs": 2e12, "actor_train": 6e12}
    flops = {"forward_flops": 4e12, "ahead_flops": 2e12, "tower_flops": tower}
    batch = RolloutBatch([], {"rollout/raw_reward": 0.75}, tokens=800, **flops)
    report.step(3, batch, trained)
    (key, step, metrics), *train = recorder.logged
    assert (key, step) == ("rollout/step", 3)
    assert metrics.pop("perf/driver_rss_gib") > 0.01
    assert {name: value for name, value in metrics.items() if name.startswith("perf/")} == {
        "perf/step_time": 8.0,
        "perf/train_wait_time": 4.0,
        "perf/train_time": 3.5,
        "perf/trainer_time": 2.75,
        "perf/columns_wait_time": 0.25,
        "perf/actor_train_time": 2.0,
        "perf/actor_train_tok_per_s": 400.0,
        # 3 x 4 TFLOPs, 2 of multi-token prediction and 6 of the tower, divided by 2 s and 2 ranks
        "perf/actor_train_tflops": 5.0,
        "perf/ref_log_probs_time": 0.5,
        "perf/ref_log_probs_tflops": 6.0,  # there is no figure for old log-probs without their pass
        "perf/handover_time": 0.5,
        "perf/wait_time_ratio": 0.5,
        "perf/step_tokens_per_sec": 100.0,
        "perf/step_tokens_per_gpu_per_sec": 25.0,
    }
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


def test_the_event_of_a_step_has_the_times_of_its_parts(tmp_path):
    ranks = {"num_steps_per_rollout": 1, "actor_num_gpus_per_node": 1, "rollout_num_gpus": 1}
    config = Config.from_flat({"run_dir": str(tmp_path), **ranks})
    report, clock = Reporter(config, Trackers([]), StepLine(total=9, stream=io.StringIO())), Clock()
    report.timers = Timers(clock)
    with report.timers.measure("step"):
        for name, seconds in (("train_wait", 4.0), ("train", 3.5), ("update_weights", 0.25)):
            with report.timers.measure(name):
                clock.now += seconds
    report.step(3, RolloutBatch([], {}, tokens=800, forward_flops=4e12), TrainResult([{}], {}, {}))
    report.close()
    (event,) = read_events(tmp_path, ("step",))
    assert event["rollout"] == 3
    assert [event[f"{name}_s"] for name in STEP_PARTS] == [4.0, 3.5, 0.25]


def test_percentiles_leave_out_the_first_and_traced_steps(parts):
    """Rollout 3 is the first of this start, and rollout 5 is traced. p50 is from rollouts 4 and 6, with 1 and 3
    seconds."""
    report, recorder, _ = parts
    clock = Clock()
    report.timers = Timers(clock)
    for rollout_id, seconds in ((3, 50.0), (4, 1.0), (5, 70.0), (6, 3.0)):
        with report.timers.measure("step"):
            clock.now += seconds
        report.step(rollout_id, RolloutBatch([], {}, 6, 0.0), TrainResult([{}], {}, {}))
    logged = [metrics for key, _, metrics in recorder.logged if key == "rollout/step"]
    assert [metrics.get("perf/step_time_p50") for metrics in logged] == [None, 1.0, 1.0, 2.0]
    assert logged[-1]["perf/step_tokens_per_sec_p50"] == 4.0  # from 6 and 2


def test_rollout_alone_and_evaluation(parts):
    report, recorder, screen = parts
    report.rollout(2, RolloutBatch([], {"rollout/raw_reward": 1.0}, tokens=0, forward_flops=0.0))
    report.evaluation(5, Evaluated({"eval/gsm8k": 0.5}))
    report.evaluation(6, Evaluated({}))  # the hook has logged it
    assert recorder.logged == [
        ("rollout/step", 2, {"rollout/raw_reward": 1.0, "rollout/step": 2}),
        ("eval/step", 5, {"eval/gsm8k": 0.5}),
    ]
    assert "eval at step 5:  gsm8k 0.5" in screen.getvalue()
    report.close("failed")
    assert recorder.closed == "failed"


def test_a_set_with_a_slash_in_its_name_is_shown(tmp_path):
    config = Config.from_flat({"run_dir": str(tmp_path), "actor_num_gpus_per_node": 1, "rollout_num_gpus": 1})
    screen = io.StringIO()
    report = Reporter(config, Trackers([Recorder()]), StepLine(stream=screen))
    figures = {"math/aime": 0.5, "math/aime-truncated_ratio": 0.25, "math/aime-pass@2": 0.75, "plain": 1.0}
    more = {"plain-truncated_ratio": 0.0, "math/aime/response_len/mean": 7.0, "plain/zero_std/count_1.0": 2.0}
    report.evaluation(4, Evaluated({f"eval/{name}": value for name, value in (figures | more).items()}))
    report.close()
    assert screen.getvalue() == (
        "eval at step 4:  math/aime 0.5  math/aime-truncated_ratio 0.25  math/aime-pass@2 0.75  plain 1"
        "  plain-truncated_ratio 0\n"
    )
    (event,) = read_events(tmp_path, ("evaluation",))
    assert event["scores"] == {"math/aime": 0.5, "plain": 1.0}


def test_what_functions_of_the_user_log_comes_with_the_answers(tmp_path):
    """The user's metrics come before the rollout's own line and after its optimizer steps. The console and the
    journal show them."""
    ranks = {"num_steps_per_rollout": 1, "actor_num_gpus_per_node": 1, "rollout_num_gpus": 1}
    config = Config.from_flat({"run_dir": str(tmp_path), **ranks})
    recorder, screen = Recorder(), io.StringIO()
    report = Reporter(config, Trackers([recorder]), StepLine(total=9, stream=screen))
    clock = Clock()
    report.timers = Timers(clock)
    with report.timers.measure("step"):
        clock.now = 8.0
    of_rollout = Logged({"rollout/raw_reward": 0.75}, 3, "rollout/step")
    of_training = Logged({"mine/a": 1.0}, 3, "train/step")
    batch = RolloutBatch([], {}, tokens=8, forward_flops=0.0, logged=[of_rollout])
    report.step(3, batch, TrainResult([{}], {}, {}, [of_training]))
    logged = [Logged({"eval/set": 0.5, "eval/set-pass@2": 1.0, "mine/b": 2.0}, 4, "rollout/step")]
    report.evaluation(4, Evaluated({}, logged))
    report.evaluation(5, Evaluated({}, [Logged({"mine/b": 2.0}, 5, "eval/step")]))  # without a score
    report.close()
    first, own, step, own_step, *evaluations = recorder.logged
    assert first == ("rollout/step", 3, {"rollout/raw_reward": 0.75}) and own[:2] == ("rollout/step", 3)
    assert (step[:2], own_step) == (("train/step", 3), ("train/step", 3, {"mine/a": 1.0}))
    assert [line[:2] for line in evaluations] == [("rollout/step", 4), ("eval/step", 5)]
    assert screen.getvalue().splitlines()[1].split()[:2] == ["3/9", "0.750"]
    assert screen.getvalue().splitlines()[2:] == ["eval at step 4:  set 0.5  set-pass@2 1"]
    (event,) = read_events(tmp_path, ("evaluation",))
    assert (event["rollout"], event["scores"]) == (4, {"set": 0.5})
