"""Tests `vime watch` with Textual's pilot: the screen of running, finished and failed runs at two sizes."""

from __future__ import annotations

import asyncio
import functools
import itertools
import json
import math
import os
import re
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from textual.app import App
from textual.pilot import Pilot
from view_cases import rollout, write_metrics, write_run

from slime.tracking.events import Events
from slime.tracking.journal import read_events
from slime.tracking.run_record import recorded
from vime.cli import main
from vime.view import watch_draw as draw
from vime.view.watch import make_app
from vime.view.watch_app import WatchApp
from vime.view.watch_data import CURVES, GroupTimes, MetricsTail, WatchedRun

SMALL, LARGE = (80, 24), (120, 40)


def lines(app: App[None]) -> list[str]:
    """Returns the characters of the screen."""
    width, height = app.size
    strips = app.screen._compositor.render_strips()
    return ["".join(segment.text for segment in strip)[:width] for strip in strips[:height]]


def is_shown(app: App[None], text: str) -> bool:
    return any(text in line for line in lines(app))


async def until(pilot: Pilot[None], condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end, "\n".join(lines(pilot.app))
        await pilot.pause(0.05)


def screen(
    run: Path, size: tuple[int, int], then: Callable[[Pilot[None]], Awaitable[None]] | None = None
) -> list[str]:
    """Returns the screen of the run after the first refresh, and after `then`."""

    async def shown() -> list[str]:
        app = make_app(run, every_s=0.1)
        async with app.run_test(size=size) as pilot:
            for part in ("slowest", "engine-0", "q quit"):
                await until(pilot, functools.partial(is_shown, app, part))
            if then is not None:
                await then(pilot)
            return lines(app)

    return asyncio.run(shown())


@pytest.mark.parametrize("size", [SMALL, LARGE])
def test_a_finished_run(tmp_path: Path, size: tuple[int, int]) -> None:
    found = screen(write_run(tmp_path / "mine", rollouts=4), size)
    assert len(found) == size[1] and {len(line) for line in found} == {size[0]}
    text = "\n".join(found)
    assert found[0].startswith(" finished  mine  4/4 rollouts ") and "100%" in found[0]
    assert "tiny 0.5 after 4" not in text, "the metrics have no evaluation"
    for title in ("reward  0 to 3", "loss  0 to 3", "tokens/s  0 to 3", "staleness (updates)"):
        assert title in text
    assert ("gradient norm" in text) is (size == LARGE)
    assert " 0.300 " in text + " " and "1,300" in text
    assert any(line.split()[:2] == ["engine-0", "ended"] for line in found)
    assert "    4.25      77      24      6" in text, "the slowest sample"
    assert "warnings: 1" in text and "rollout group 3 is late" in text and "\x1b" not in text
    assert "q quit" in found[-1]


def test_a_run_on_given_responses_shows_its_held_out_loss(tmp_path: Path) -> None:
    """The loss is in the first curve, and in the second line with the accuracy."""
    run = write_run(tmp_path / "mine")
    rows = [{"step_key": "train/step", "step": i, "time": 1.0, "train/loss": 0.5} for i in range(4)]
    figures = {"eval/a/rewards/accuracies": 0.75, "eval/a/rewards/margins": 3.0}
    for step, loss in ((0, 0.625), (2, 0.25), (4, 0.375)):
        rows.append({"step_key": "eval/step", "step": step, "time": 1.0, "eval/a/loss": loss, **figures})
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    look = WatchedRun(run).look()
    assert look.curves["held-out loss"] == look.scores["a/loss"] == {0: 0.625, 2: 0.25, 4: 0.375}
    assert set(look.scores) == {"a/loss", "a/rewards/accuracies"} and "reward" not in look.curves
    text = "\n".join(screen(run, LARGE))
    assert (
        "held-out loss  0 to 4" in text
        and "; a/loss 0.375 after 4; a/rewards/accuracies 0.75 after 4" in text
    )


@pytest.mark.parametrize("size", [SMALL, (110, 36), (120, 36), (181, 40), (182, 36)])
def test_no_title_of_a_curve_is_cut(tmp_path: Path, size: tuple[int, int]) -> None:
    """Each curve shows its whole title, steps and newest value, also in a run of thousands of steps."""
    run = write_run(tmp_path / "mine", rollouts=4)
    named = {curve.metrics[0]: -0.123456 for curve in CURVES}
    with (run / "metrics.jsonl").open("a") as file:
        for step, key in itertools.product((4, 1234), ("rollout/step", "train/step")):
            file.write(json.dumps({"step_key": key, "step": step, "time": 1.0} | named) + "\n")
    text = "\n".join(screen(run, size))
    for curve in CURVES[: 4 if size == SMALL else None]:
        value = format(named[curve.metrics[0]], curve.spec)
        assert re.search(rf"{re.escape(curve.title)}  \d+ to 1234 +{re.escape(value)}( |$)", text, re.M), (
            curve
        )
    assert "…" not in text


@pytest.mark.parametrize("size", [SMALL, LARGE])
def test_a_failed_run_says_why(tmp_path: Path, size: tuple[int, int]) -> None:
    found = screen(write_run(tmp_path / "mine", error=OSError(28, "No space left on device")), size)
    assert found[0].startswith(" failed  mine  2/4 rollouts ")
    assert found[2].startswith("full disk: [Errno 28] No space left on device")
    assert found[3].startswith("remedy: remove files there")


def test_a_run_that_goes_on(tmp_path: Path) -> None:
    run = write_run(tmp_path / "mine")
    manager, trainer, engines = (Events(name, str(run)) for name in ("rollout", "trainer-0", "engines"))

    async def goes_on(pilot: Pilot[None]) -> None:
        with recorded(run, rollouts=4) as driver:
            driver.add("start", rollout=2)
            await until(pilot, lambda: " running  mine  2/4" in lines(pilot.app)[0])
            rollout(2, driver, manager, trainer, engines)
            engines.add("load", model="policy", engine="engine-0", running=7, waiting=2, kv_cache=0.5)
            write_metrics(run, range(2, 3))
            trainer.add("phase_begin", phase="train", device="cuda:0", rollout=3)
            manager.add("drawn", groups=[99], version=3)
            await until(pilot, lambda: " running  mine  3/4" in lines(pilot.app)[0])
            await until(pilot, lambda: "now: trainer-0 train" in lines(pilot.app)[1])
            await until(pilot, lambda: any("reward  0 to 2" in line for line in lines(pilot.app)))
            await until(pilot, lambda: is_shown(pilot.app, "engine-0   serving      3   50%   7    2"))
            assert "left" in lines(pilot.app)[0]
        await until(pilot, lambda: lines(pilot.app)[0].startswith(" finished "))

    screen(run, SMALL, goes_on)
    for events in (manager, trainer, engines):
        events.close()


def test_keys_and_a_new_size(tmp_path: Path) -> None:
    async def keys(pilot: Pilot[None]) -> None:
        assert not any("gradient norm" in line for line in lines(pilot.app))
        await pilot.press("m")
        await until(pilot, lambda: any("gradient norm" in line for line in lines(pilot.app)))
        assert not any("staleness" in line for line in lines(pilot.app))
        await pilot.resize_terminal(*LARGE)
        await until(pilot, lambda: len(lines(pilot.app)) == LARGE[1])
        await until(pilot, lambda: all(any(c.title in line for line in lines(pilot.app)) for c in CURVES[:2]))
        await pilot.press("q")

    screen(write_run(tmp_path / "mine"), SMALL, keys)


def test_a_run_that_can_be_read_no_longer_ends_the_view(tmp_path: Path) -> None:
    run = write_run(tmp_path / "mine")

    async def shown() -> WatchApp:
        app = make_app(run, every_s=0.05)
        async with app.run_test(size=SMALL) as pilot:
            with (run / "metrics.jsonl").open("a") as file:
                file.write("no metrics\n")
            await until(pilot, lambda: any("1 damaged lines in metrics.jsonl" in line for line in lines(app)))
            (run / "metrics.jsonl").unlink()
            os.mkfifo(run / "metrics.jsonl")
            await until(pilot, lambda: app.problem is not None)
        return app

    problem = str(asyncio.run(shown()).problem)
    assert "must be regular files, got" in problem and "metrics.jsonl" in problem


def test_what_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "mine")
    for arguments, words in {
        (str(tmp_path),): f"RUN_DIR must have events.jsonl, got none in {tmp_path}",
        (str(run), "--every-s", "0"): "--every-s must be above 0, got 0",
        (str(run),): "vime watch must have a terminal, got a file or a pipe",
    }.items():
        assert main(["watch", *arguments]) == 2
        assert words in capsys.readouterr().err


def test_without_its_package_the_error_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(sys.modules, "vime.view.watch_app", raising=False)
    monkeypatch.setitem(sys.modules, "textual", None)
    monkeypatch.setitem(sys.modules, "textual.app", None)
    assert main(["watch", str(write_run(tmp_path / "mine"))]) == 2
    assert "vime watch must have the package textual, got none installed" in capsys.readouterr().err


def test_an_older_run_and_lines_that_are_cut(tmp_path: Path) -> None:
    run = write_run(tmp_path / "mine")
    events, metrics = run / "events.jsonl", run / "metrics.jsonl"
    events.write_text(
        "".join(line for line in events.read_text().splitlines(keepends=True) if '"journal"' not in line)
    )
    watched = WatchedRun(run)
    assert watched.look().summary.rollout == 1
    with metrics.open("a") as file:
        file.write('{"step_key": "rollout/step", "step": 2, "time": 1.0, "rollout/raw_reward": 0.')
    assert set(watched.look().curves["reward"]) == {0, 1}
    with metrics.open("a") as file:
        file.write("75}\n")
    assert watched.look().curves["reward"][2] == 0.75
    assert math.isnan(watched.look().curves["loss"][1])


def test_a_run_that_resumes_replaces_its_metrics(tmp_path: Path) -> None:
    write_metrics(tmp_path, range(4))
    tail = MetricsTail(tmp_path)
    tail.read()
    assert set(tail.series["train/loss"]) == {0, 1, 2, 3}
    new = tmp_path / "new"
    new.mkdir()
    write_metrics(new, range(2), shift=1.0)
    (new / "metrics.jsonl").rename(tmp_path / "metrics.jsonl")
    tail.read()
    assert tail.series["rollout/raw_reward"] == {0: 1.0, 1: 1.1}


def test_groups_that_take_longest(tmp_path: Path) -> None:
    events, times = Events("rollout", str(tmp_path)), GroupTimes()
    events.add("drawn", groups=[1, 2, 3], version=0)
    events.add("ended", groups=[1], sample=5, seconds=0.25, tokens=6)
    events.add("dropped", groups=[2], reason="stale")
    events.close()
    found = list(read_events(tmp_path))
    for event in found:
        times.add(event)
    late, ended = times.slowest(now=found[-1].time + 9)
    assert (late.group, late.goes_on) == (3, True) and late.seconds >= 9
    assert (ended.group, ended.sample, ended.seconds, ended.tokens) == (1, 5, 0.25, 6)
    assert [one.group for one in times.slowest(None)] == [1], "the run has ended"


def test_a_plot_has_its_ends_at_the_edges_and_leaves_gaps_for_nan() -> None:
    rows = draw.plot(draw.column_means({0: 0.0, 1: 1.0}, 2), 1, 1)
    assert rows == ["⡜"], "from the lowest dot of the left column to the highest of the right one"
    points = {step: float(step % 7) for step in range(1000)}
    drawn = draw.column_means(points, 40)
    assert len(drawn) == 40 and all(abs(value - 3) < 0.5 for value in drawn.values())
    assert 5 not in draw.column_means({step: math.nan if step == 5 else 1.0 for step in range(10)}, 10)
    flat = draw.plot(draw.column_means({0: 2.0, 1: 2.0, 2: 2.0}, 6), 3, 2)
    assert all(len(row) == 3 for row in flat) and any(row.strip("⠀") for row in flat)


def test_texts_of_a_run_cannot_command_the_terminal() -> None:
    assert draw.one_line("\x1b[31mred\x1b[0m \x1b]0;title\x07a\x00b\n\tc\x1b[2J\r") == "red a b c"
    assert [draw.seconds(value) for value in (3.25, 65, 3661)] == ["3.2 s", "1:05", "1:01:01"]
