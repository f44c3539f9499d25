"""Tests the order of the loop, with small implementations of its three protocols that record every call."""

from __future__ import annotations

import ast
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from loop_double import LoopRun, words

from slime import loop
from slime.protocols import NoEngines

BRANCHES = (
    ast.If,
    ast.For,
    ast.While,
    ast.IfExp,
    ast.ExceptHandler,
    ast.BoolOp,
    ast.comprehension,
    ast.Match,
)


def test_the_loop_has_at_most_eight_branches():
    """Counts each `if`, `for`, `while`, `except`, `match`, conditional expression, comprehension, boolean operator."""
    functions = ast.parse(Path(loop.__file__).read_text()).body
    run = next(f for f in functions if isinstance(f, ast.FunctionDef) and f.name == "run")
    assert sum(isinstance(node, BRANCHES) for node in ast.walk(run)) <= 8


def test_synchronous():
    run = LoopRun()
    assert run.go() == words("publish 0,generate 0, train 0, publish 1,generate 1, train 1, publish 2")
    assert run.generated_with == [0, 1]
    assert run.logged == [("rollout/step", 0), ("train/step", 0), ("rollout/step", 1), ("train/step", 1)]


@pytest.mark.parametrize("drops", [True, False])
def test_colocated_engines_sleep_while_the_trainer_works(drops):
    run = LoopRun(colocate=True, save="dir", save_interval=1, num_rollout=1)
    run.drops_weights = drops
    again = ", publish 1" if drops else ""
    assert run.go() == words(
        "publish 0, generate 0, sleep, train 0, wake, publish 1," + "sleep, save 0, wake" + again
    )


@pytest.mark.parametrize("staleness", [0, 1, 2, 9])
def test_generation_runs_ahead_by_max_staleness(staleness):
    run = LoopRun(max_staleness=staleness, num_rollout=5)
    calls = run.go()
    assert [c for c in calls if c.startswith("generate")] == [f"generate {i}" for i in range(5)]
    assert [c for c in calls if c.startswith("train")] == [f"train {i}" for i in range(5)]
    assert run.generated_with == [max(i - staleness, 0) for i in range(5)]


@pytest.mark.parametrize("drops", [True, False])
def test_the_trainer_computes_held_out_losses_with_the_devices(drops):
    run = LoopRun(colocate=True, num_rollout=1, eval_interval=1)
    run.held_out, run.drops_weights = ["data"], drops
    again = ", publish {}" if drops else ""
    losses = "evaluate {0}, sleep, losses {0} {{'held': ['data']}}, wake" + again.format("{0}")
    assert run.go() == words(
        "publish 0," + losses.format(0) + ", generate 0, sleep, train 0, wake, publish 1," + losses.format(1)
    )
    assert run.report._evaluations == {n: {"set": float(n), "held/loss": 0.5} for n in (0, 1)}


def test_one_rollout_ahead():
    assert LoopRun(max_staleness=1, num_rollout=3).go() == words(
        "publish 0,"
        "generate 0, generate 1, train 0, publish 1,"
        "generate 2, train 1, publish 2,"
        "train 2, publish 3"
    )


def test_two_rollouts_ahead():
    assert LoopRun(max_staleness=2, num_rollout=4).go() == words(
        "publish 0,"
        "generate 0, generate 1, generate 2, train 0, publish 1,"
        "generate 3, train 1, publish 2,"
        "train 2, publish 3, train 3, publish 4"
    )


def test_weights_at_an_interval():
    run = LoopRun(update_weights_interval=2, max_staleness=1, num_rollout=4)
    calls = run.go()
    assert [c for c in calls if c.startswith("publish")] == ["publish 0", "publish 2", "publish 4"]
    assert calls.index("publish 2") == calls.index("train 1") + 1
    assert run.generated_with == [0, 0, 2, 2]
    assert all(i - version <= 1 for i, version in enumerate(run.generated_with))


def test_evaluation_before_and_at_its_interval():
    calls = LoopRun(eval_interval=2, num_rollout=4).go()
    evaluations = [(calls[i - 1], c) for i, c in enumerate(calls) if c.startswith("evaluate")]
    assert evaluations == [
        ("publish 0", "evaluate 0"),
        ("publish 2", "evaluate 2"),
        ("publish 4", "evaluate 4"),
    ]
    calls = LoopRun(eval_interval=2, num_rollout=4, skip_eval_before_train=True).go()
    assert [c for c in calls if c.startswith("evaluate")] == ["evaluate 2", "evaluate 4"]
    assert not [c for c in LoopRun().go() if c.startswith("evaluate")]


def test_no_rollout_with_an_interval_evaluates_once():
    assert LoopRun(eval_interval=5, num_rollout=0).go() == ["publish 0", "evaluate 0"]
    run = LoopRun(start=7, eval_interval=5, num_rollout=0, skip_eval_before_train=True)
    assert run.go() == ["publish 7", "evaluate 7"], "of a resumed checkpoint, whatever its number"
    assert run.logged == [("eval/step", 7)]


def test_rollouts_without_training_are_evaluated():
    def calls(**flags):
        run = LoopRun(**flags)
        loop.generate_only(run.config, run, run, run.report)
        return run.calls

    assert calls(eval_interval=2, num_rollout=3) == words(
        "evaluate 0, generate 0, generate 1, evaluate 2, generate 2"
    )
    assert calls(eval_interval=2, num_rollout=2, skip_eval_before_train=True)[0] == "generate 0"
    assert calls(eval_interval=1, num_rollout=0) == ["evaluate 0"]
    assert calls(num_rollout=1) == ["generate 0"]


def test_evaluations_are_logged():
    run = LoopRun(eval_interval=1, num_rollout=1)
    run.go()
    assert [entry for entry in run.logged if entry[0] == "eval/step"] == [("eval/step", 0), ("eval/step", 1)]


@pytest.mark.parametrize(
    ("flags", "saved"),
    [
        ({"save": "dir", "save_interval": 2}, ["save 1", "save 3", "save 4"]),
        ({"save": "dir"}, ["save 4"]),
        ({"save_interval": 1}, []),
    ],
)
def test_saving(flags, saved):
    run = LoopRun(num_rollout=5, max_staleness=1, **flags)
    calls = run.go()
    assert [c for c in calls if c.startswith("save")] == saved
    assert [f"save {i}" for i in run.with_checkpoint] == saved
    assert all(calls.index(c) > calls.index(c.replace("save", "train")) for c in saved)


def test_resumed_run():
    """The run resumes at rollout 3 of 5. The engines get version 3 first, and a due evaluation is repeated."""
    run = LoopRun(start=3, num_rollout=5, eval_interval=3, max_staleness=1)
    assert run.go() == words(
        "publish 3, evaluate 3, generate 3, generate 4,train 3, publish 4, train 4, publish 5"
    )
    assert LoopRun(start=5, num_rollout=5).go() == ["publish 5"]


def test_training_alone_publishes_nothing():
    assert LoopRun().go(NoEngines()) == words("generate 0, train 0, generate 1, train 1")


def test_rollouts_alone():
    run = LoopRun(start_rollout_id=1, num_rollout=3)
    loop.generate_only(run.config, run, run, run.report)
    assert run.calls == ["generate 1", "generate 2"]
    assert run.logged == [("rollout/step", 1), ("rollout/step", 2)]


class LostEngine(LoopRun):
    def generate(self, rollout_id: int, saves: bool, version: int) -> Future:
        return Future()  # this future never completes

    def check_health(self) -> None:
        super().check_health()
        raise RuntimeError("engine 0 is lost")


def test_a_lost_engine_ends_the_wait():
    run = LostEngine()
    with pytest.raises(RuntimeError, match="engine 0 is lost"):
        run.go()
    assert run.calls == ["publish 0", "check_health"]


class FailingRollout(LoopRun):
    def generate(self, rollout_id: int, saves: bool, version: int) -> Future:
        future: Future = Future()
        future.set_exception(TimeoutError("a batch of groups passed its deadline"))
        return future


def test_a_timeout_of_the_work_itself_is_raised():
    """The loop separates it from its wait's timeout, so the health check does not end the run."""
    run = FailingRollout()
    with pytest.raises(TimeoutError, match="passed its deadline"):
        run.go()
    assert run.calls == ["publish 0"]


def test_a_run_that_is_asked_to_stop_saves_after_its_step():
    run = LoopRun(num_rollout=5, save="dir", save_interval=4, exit_signal_handler=True, eval_interval=2)
    run.stops_in = 1
    assert run.go() == words(
        "publish 0, evaluate 0, generate 0, train 0, publish 1, generate 1, train 1, publish 2, save 1"
    )
    assert run.next == 2
    assert run.with_checkpoint == [0, 1]  # any rollout may be the last, so each stores its data position
    last = LoopRun(num_rollout=2, save="dir", exit_signal_handler=True)
    last.stops_in = 1
    assert last.go()[-1] == "save 1" and last.next == 2


class StoppedRun(LoopRun):
    """A run that gets SIGTERM during the call `stops_at`, which never ends."""

    def __init__(self, stops_at: str, **flags: Any) -> None:
        super().__init__(save="dir", exit_signal_handler=True, eval_interval=2, num_rollout=5, **flags)
        self.stops_at = stops_at

    def _unless_stopped(self, made: Future) -> Future:
        if self.calls[-1] != self.stops_at:
            return made
        self.stop.set()
        return Future()

    def generate(self, rollout_id: int, saves: bool, version: int) -> Future:
        return self._unless_stopped(super().generate(rollout_id, saves, version))

    def evaluate(self, rollout_id: int) -> Future:
        return self._unless_stopped(super().evaluate(rollout_id))


@pytest.mark.parametrize(
    ("stops_at", "flags", "last_calls"),
    [
        ("generate 3", {}, "train 2, publish 3, generate 3, save 2"),
        ("evaluate 4", {}, "train 3, publish 4, evaluate 4, save 3"),
        ("evaluate 4", {"save_interval": 2}, "publish 4, save 3, evaluate 4"),
        ("generate 4", {"save_interval": 4}, "save 3, evaluate 4, generate 4"),
        ("generate 4", {"max_staleness": 2}, "generate 4, train 2, publish 3, save 2"),
        ("evaluate 0", {}, "publish 0, evaluate 0"),
        ("generate 0", {}, "publish 0, evaluate 0, generate 0"),
    ],
)
def test_what_a_run_can_do_without_is_given_up(stops_at, flags, last_calls):
    """The run saves without waiting for a rollout or an evaluation that it does not need."""
    run = StoppedRun(stops_at, **flags)
    calls = [call for call in run.go() if call != "check_health"]
    wanted = words(last_calls)
    assert calls[-len(wanted) :] == wanted
    trained = [int(call.split()[1]) for call in calls if call.startswith("train")]
    assert run.next == max(trained, default=-1) + 1
    steps = [step for key, step in run.logged if key == "rollout/step"]
    assert max(steps, default=-1) == max(trained, default=-1), "no line of a step that was not made"


def test_a_signal_before_the_first_step_starts_nothing():
    run = LoopRun(save="dir", exit_signal_handler=True, eval_interval=1)
    run.stop.set()
    assert (run.go(), run.next) == (["publish 0"], 0)


def test_an_evaluation_is_of_the_weights_of_its_step():
    """With --update-weights-interval 2, the loop publishes the weights of step 3 only for this evaluation."""
    run = LoopRun(update_weights_interval=2, max_staleness=1, num_rollout=3, eval_interval=1)
    assert run.go() == words(
        "publish 0, evaluate 0, generate 0, train 0, publish 1, evaluate 1,"
        "generate 1, train 1, publish 2, evaluate 2, generate 2, train 2, publish 3, evaluate 3"
    )
    ahead = LoopRun(update_weights_interval=2, max_staleness=3, num_rollout=5, eval_interval=3).go()
    evaluated = [(ahead[i - 1], call) for i, call in enumerate(ahead) if call.startswith("evaluate")]
    assert evaluated == [("publish 0", "evaluate 0"), ("publish 3", "evaluate 3")]
    assert [call for call in ahead if call.startswith("publish")] == words(
        "publish 0, publish 2, publish 3, publish 4"
    )


def test_the_end_of_a_run_waits_for_an_asynchronous_save():
    run = LoopRun(save="dir", save_interval=1, async_save=True)
    assert run.go()[-4:] == words("train 1, publish 2, save 1, finish save")
    assert "finish save" not in LoopRun(save="dir", save_interval=1).go()
