"""A run that cannot learn is named: in the console, in the journal and by `vime doctor`."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from slime.config import Config
from slime.protocols import RolloutBatch, TrainResult
from slime.tracking import concerns
from slime.tracking.concerns import AGAIN_EVERY, CONDITIONS, IN_A_ROW, Concerns, step_figures
from slime.tracking.console import StepLine
from slime.tracking.events import Events
from slime.tracking.journal import Tail, read_events
from slime.tracking.report import Reporter
from slime.tracking.run_record import recorded
from slime.tracking.run_summary import run_summary
from slime.tracking.trackers import Trackers
from vime.doctor.command import main

SAMPLES = {
    "failed_sessions": 0.05,
    "untrained": 0.0,
    "truncated": 0.2,
    "reward_mean": 0.5,
    "reward_range": 1.0,
    "without_spread": 0.4,
}
STEPS = {"grad_norm": 1.3, "learning_rate": 1e-6, "ppo_kl": 1e-4, "kl_loss": 0.02, "entropy": 0.6}
HEALTHY = SAMPLES | STEPS
EQUAL = {"reward_range": 0.0, "without_spread": 1.0, "grad_norm": 0.0}
BAD = {
    "sessions fail": {"failed_sessions": 0.25},
    "entropy collapses": {"entropy": 1e-4},
    "all samples dropped": {"untrained": 1.0, "grad_norm": 0.0},
    "all rewards 0": EQUAL | {"reward_mean": 0.0},
    "no spread of rewards": EQUAL | {"reward_mean": 1.0},
    "learning rate 0": {"learning_rate": 0.0},
    "gradient 0": {"grad_norm": 0.0},
    "all answers truncated": {"truncated": 1.0},
    "KL to the reference explodes": {"kl_loss": 5.1},
    "KL of a step explodes": {"ppo_kl": -1.1},
    "entropy explodes": {"entropy": 2.1},
}


SAID = {"session_ends": "request: 25%, said: a tool must have a name, got None"}
AT_ONCE = "sessions fail"


def begun(rollouts: list[dict[str, float]]) -> list[tuple[str, int, str]]:
    """Returns name, rollout and state per printed concern."""
    watch = Concerns()
    return [
        (concern.condition.name, rollout, concern.state)
        for rollout, figures in enumerate(rollouts)
        for concern in watch.observe(rollout, figures, SAID)
    ]


def test_every_condition_has_a_case() -> None:
    assert list(BAD) == [one.name for one in CONDITIONS]
    assert begun([HEALTHY] * 9) == []


@pytest.mark.parametrize("name", [name for name in BAD if name != AT_ONCE])
def test_a_condition_is_told_after_three_rollouts_and_when_it_ends(name: str) -> None:
    bad = HEALTHY | BAD[name]
    assert begun([HEALTHY, *[bad] * 2, HEALTHY, *[bad] * 2]) == []
    assert begun([HEALTHY, *[bad] * 5, HEALTHY]) == [(name, IN_A_ROW, "begins"), (name, 6, "ends")]
    again = [(name, IN_A_ROW, "begins"), (name, IN_A_ROW + AGAIN_EVERY, "goes on")]
    assert begun([HEALTHY, *[bad] * (AGAIN_EVERY + 5)]) == again


@pytest.mark.parametrize(
    "figures",
    [
        {"reward_mean": 0.0},  # rewards are -1 and 1
        {"without_spread": 0.99},  # one group has spread
        {"truncated": 0.99},
        {"untrained": 0.99},
        {"grad_norm": 1e-9},
        {"kl_loss": 4.9, "ppo_kl": 0.9},
        {"failed_sessions": 0.09},
        {"entropy": 0.011},  # a twentieth would be 0.03
        {"entropy": 1.9},  # 3 times as much as before, and still sharp
    ],
)
def test_the_last_value_that_is_no_concern(figures: dict[str, float]) -> None:
    assert begun([HEALTHY, *[HEALTHY | figures] * 5]) == []


def test_sessions_that_fail_are_a_concern_at_once() -> None:
    bad = HEALTHY | {"failed_sessions": 0.1}
    assert begun([HEALTHY, bad, HEALTHY]) == [(AT_ONCE, 1, "begins"), (AT_ONCE, 2, "ends")]
    again = [(AT_ONCE, 0, "begins"), (AT_ONCE, AGAIN_EVERY, "goes on")]
    assert begun([bad] * (AGAIN_EVERY + 5)) == again


def test_console_and_doctor_show_why_sessions_ended(tmp_path: Path, capsys) -> None:
    """A quarter of the sessions end, because a tool has no name. Console and doctor show this reason."""
    shown = run(tmp_path, [HEALTHY | BAD[AT_ONCE]] * 2)
    told = "25% of the sessions of rollout 0 are not trained on; sessions ended request: 25%, said: a tool must have"
    assert f"warning: sessions fail: {told} a name, got None; look at" in shown
    assert main([str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    (line,) = [line for line in printed.splitlines() if "sessions fail" in line]
    assert line.startswith("warning") and told in line and "remedy: look at metadata" in line


def test_a_learning_rate_that_kills_the_policy_is_named() -> None:
    """With --lr 10, the entropy and the gradient are 0 after one step. The warning names this, not only the prompts."""
    dead = HEALTHY | EQUAL | {"reward_mean": 1.0, "entropy": 1e-7}
    assert [name for name, _, _ in begun([HEALTHY, *[dead] * 3])] == [
        "entropy collapses",
        "no spread of rewards",
    ]
    (condition,) = [one for one in CONDITIONS if one.name == "entropy collapses"]
    assert "--lr" in condition.remedy


def test_a_policy_that_writes_little_else_from_the_beginning_has_not_collapsed() -> None:
    assert begun([HEALTHY | {"entropy": 0.008}] * 6) == []


def test_figures_that_are_not_there_hold_nothing() -> None:
    """SFT has no rewards. A rollout without a figure changes nothing."""
    assert begun([{}] * 5) == []
    assert begun([{"grad_norm": 0.0}, {}, {"grad_norm": 0.0}, {"grad_norm": 0.0}]) == [
        ("gradient 0", 3, "begins")
    ]


def test_a_policy_that_begins_at_random_has_not_exploded() -> None:
    assert begun([HEALTHY | {"entropy": 4.2}] * 6) == []
    falls = [HEALTHY | {"entropy": value} for value in (0.9, 0.0, 0.1, 2.5, 2.5, 2.5)]
    assert begun(falls) == [("entropy explodes", 5, "begins")]


def test_the_figures_of_a_rollout_with_several_steps() -> None:
    steps = [
        {"train/grad_norm": 0.0, "train/lr-pg_0": 0.0, "train/ppo_kl": 0.0, "train/kl_loss": 1.0},
        {"train/grad_norm": 0.2, "train/lr-pg_0": 1e-6, "train/ppo_kl": -0.3, "train/kl_loss": 2.0},
    ]
    assert step_figures(steps) == {"grad_norm": 0.2, "learning_rate": 1e-6, "ppo_kl": -0.3, "kl_loss": 2.0}
    assert step_figures([]) == {}


def steps_of(figures: dict[str, float]) -> list[dict[str, float]]:
    names = {"learning_rate": "lr-pg_0", "entropy": "entropy_loss"}
    return [{f"train/{names.get(name, name)}": figures[name] for name in STEPS}]


def run(run_dir: Path, rollouts: list[dict[str, float]], sizes: int = 3) -> str:
    """Returns the console output of a run whose rollouts have these figures."""
    screen = io.StringIO()
    config = Config.from_flat({"run_dir": str(run_dir), "num_steps_per_rollout": 1, "rollout_num_gpus": 1})
    run_dir.mkdir(exist_ok=True)
    with recorded(run_dir, rollouts=len(rollouts)):
        report = Reporter(config, Trackers([]), StepLine(stream=screen))
        report.start(0)
        for rollout, figures in enumerate(rollouts):
            with report.running(rollout):
                pass
            learning = {name: figures[name] for name in (*SAMPLES, "text_labels") if name in figures}
            sizes = {"tokens": 1, "forward_flops": 1.0}
            batch = RolloutBatch([], {}, **sizes, learning=learning, learning_texts=SAID)
            report.step(rollout, batch, TrainResult(steps_of(figures), {}, {"perf/train_time": 1.0}))
        report.close()
    return screen.getvalue()


def test_console_journal_and_doctor_name_a_run_that_cannot_learn(tmp_path: Path, capsys) -> None:
    """20 rollouts with equal rewards and a gradient of 0 are a problem for all three."""
    shown = run(tmp_path, [HEALTHY | BAD["all rewards 0"]] * 20)
    lines = [line for line in shown.splitlines() if "warning" in line]
    assert lines[0].startswith("warning: all rewards 0: each reward of rollouts 0 to 2 is 0; look at samples")
    assert lines[1].startswith("warning: until the end, all rewards 0: each reward of rollouts 0 to 19 is 0")
    assert len(lines) == 2
    (event,) = read_events(tmp_path, kinds=(concerns.BEGINS, concerns.ENDS))
    assert (event.kind, event["name"], event["rollout"]) == ("concern_begin", "all rewards 0", 2)
    assert "--label-key" in event["remedy"]
    summary = run_summary(tmp_path)
    assert summary.warnings == [event] and summary.concerns == {"all rewards 0": event}
    assert main([str(tmp_path)]) == 1
    printed = capsys.readouterr().out
    line, last = [line for line in printed.splitlines() if "all rewards 0" in line]
    assert line.startswith("problem") and "from rollout 2 until the end" in line and "remedy: look at" in line
    assert last == f"1 problem, 0 warnings: the run in {tmp_path} learns nothing: all rewards 0"


def test_what_is_over_and_what_does_not_stop_learning_is_a_warning(tmp_path: Path, capsys) -> None:
    over = [HEALTHY, *[HEALTHY | BAD["no spread of rewards"]] * 4, HEALTHY]
    shown = run(tmp_path / "over", over)
    assert (
        "warning: no spread of rewards: no longer so in rollout 5" in shown and "until the end" not in shown
    )
    assert main([str(tmp_path / "over")]) == 0
    assert "until rollout 5: the rewards of rollouts 1 to 4 do not differ" in capsys.readouterr().out
    run(tmp_path / "cut", [HEALTHY | BAD["all answers truncated"]] * 4)
    assert main([str(tmp_path / "cut")]) == 0
    assert "0 problems, 1 warning" in capsys.readouterr().out


def test_a_run_that_resumes_is_watched_anew(tmp_path: Path) -> None:
    run(tmp_path, [HEALTHY | BAD["all rewards 0"]] * 3)
    run(tmp_path, [HEALTHY] * 3)
    assert run_summary(tmp_path).concerns == {}


def test_the_console_shows_what_the_rollout_manager_records(tmp_path: Path, monkeypatch) -> None:
    """All groups of a rollout are dropped, so no rollout ends and the driver has no figures."""
    screen, clock = io.StringIO(), iter(range(0, 1000, 10))
    monkeypatch.setattr(concerns.time, "monotonic", lambda: next(clock))
    config = Config.from_flat({"run_dir": str(tmp_path), "rollout_num_gpus": 1})
    events = Events("rollout", str(tmp_path))
    concerns.dropped_groups(0, 12, 4).record(events)  # an earlier process recorded it
    report = Reporter(config, Trackers([]), StepLine(stream=screen))
    report.heed()
    report.heed()
    assert screen.getvalue() == ""
    assert [concerns.dropped_groups(1, dropped, 4) for dropped in (11, 13)] == [None, None]
    concerns.dropped_groups(1, 12, 4).record(events)
    concerns.end_dropped_groups(1, 15, 4).record(events)
    report.heed()
    (line,) = screen.getvalue().splitlines()
    assert line.startswith(
        "warning: all groups dropped: 12 groups in a row were dropped, and a batch needs 4; look"
    )
    events.close()
    report.close()


def test_a_tail_begins_at_the_end_of_the_last_file(tmp_path: Path) -> None:
    events = Events("driver", str(tmp_path), file_bytes=300)
    for rollout in range(9):
        events.add("start", rollout=rollout)
    assert len(list(tmp_path.glob("events*.jsonl"))) > 2
    tail = Tail(tmp_path, kinds=("start",))
    tail.skip()
    assert list(tail.new()) == []
    events.add("start", rollout=9)
    events.add("start", rollout=10)
    assert [event["rollout"] for event in tail.new()] == [9, 10]
    tail.close()
    events.close()


def test_the_remedy_names_the_run_and_the_type_of_the_labels(tmp_path: Path) -> None:
    """The remedy has the run's real folder. A reward that compares a CSV's text label with a number is always 0."""
    bad, run_dir = HEALTHY | BAD["all rewards 0"], tmp_path / "my run"
    for labels in ({}, {"text_labels": 1.0}):
        shown = run(run_dir, [bad | labels] * 4)
        assert f"look at samples (vime ui '{run_dir}'): does the reward find the answer" in shown
        assert ("(labels are text here, also those that look like numbers" in shown) == bool(labels)
    shown = run(run_dir, [HEALTHY | BAD["no spread of rewards"]] * 4)
    assert f"vime ui '{run_dir}'" in shown and "RUN_DIR" not in shown
