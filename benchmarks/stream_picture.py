"""Draws when engine, manager and trainer of runs work and when they are idle, from the runs' events.jsonl.

    python benchmarks/stream_picture.py stream_cpu.json --work runs/stream_speed --out stream_idle.png

`--work` is the folder of the record's runs, see stream_speed.py. The engine works while a group lacks responses or
rewards. The manager works from the time at which a batch is complete until it is train data. The trainer works while it
trains and while its weights are sent.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from slime.tracking.journal import Event, read_events

PARTS = ("engine", "manager", "trainer")
COLOURS = {
    "engine": "#0072B2",
    "manager": "#E69F00",
    "trainer": "#009E73",
    "measured": "#0072B2",
    "bound": "#8C8C8C",
}
SHOWN_S = 8.0

Span = tuple[float, float]


@dataclass(frozen=True)
class Activity:
    """The working times of a run. `spans` has (begin, end) per part, in seconds since the run's first event. `running`
    has (time, number of groups in generation) at each change. `begin` and `end` bound the steps that count."""

    spans: dict[str, list[Span]]
    running: list[tuple[float, int]]
    begin: float
    end: float

    def idle(self, part: str) -> float:
        """Returns the share of the time from `begin` to `end` in which a part was idle."""
        busy = sum(max(0.0, min(stop, self.end) - max(start, self.begin)) for start, stop in self.spans[part])
        return 1 - busy / (self.end - self.begin)


def activity(run_dir: Path, warm_up: int) -> Activity:
    """Reads the working times of the parts of a run. The first `warm_up` steps do not count."""
    events = list(read_events(run_dir))
    zero = events[0].time
    spans: dict[str, list[Span]] = {part: [] for part in PARTS}
    cut: dict[int, float] = {}
    ends: list[float] = []
    for event in events:
        now = event.time - zero
        match event.kind:
            case "batch":
                cut[event["rollout"]] = now
            case "handed":
                spans["manager"].append((cut[event["rollout"]], now))
            case "step":
                spans["trainer"].append((now - event["train_s"] - event["update_weights_s"], now))
                ends.append(now)
    running = groups_over_time(events)
    spans["engine"] = above_zero([*running, (ends[-1], 0)])
    return Activity(spans, running, ends[warm_up - 1], ends[-1])


def groups_over_time(events: Sequence[Event]) -> list[tuple[float, int]]:
    """Returns (seconds since the first event, number of groups in generation) at each change."""
    groups: set[int] = set()
    out = []
    for event in events:
        if event.kind == "drawn":
            groups |= set(event["groups"])
        elif event.kind == "ended":
            groups -= set(event["groups"])
        else:
            continue
        out.append((event.time - events[0].time, len(groups)))
    return out


def above_zero(points: Sequence[tuple[float, int]]) -> list[Span]:
    """Returns the time spans in which the count is above 0."""
    spans, began = [], None
    for now, count in points:
        if count and began is None:
            began = now
        elif not count and began is not None:
            spans.append((began, now))
            began = None
    return spans


def idle_shares(run_dir: Path, warm_up: int) -> dict[str, float]:
    found = activity(run_dir, warm_up)
    return {part: found.idle(part) for part in PARTS}


def draw(record: dict[str, Any], runs: dict[int, Activity], out: Path) -> None:
    """Draws one timeline per staleness, and one panel with the speeds and the bounds of the simulated queue."""
    levels = sorted(runs)
    figure, panels = plt.subplots(
        len(levels) + 1, 1, figsize=(9, 1.55 * len(levels) + 2.2), constrained_layout=True
    )
    window = min(SHOWN_S, *(run.end - run.begin for run in runs.values()))
    for axes, staleness in zip(panels, levels, strict=False):
        _timeline(axes, runs[staleness], window)
        idle = ", ".join(f"{part} {100 * runs[staleness].idle(part):.0f}%" for part in PARTS)
        name = "synchronous" if staleness == 0 else f"--max-staleness {staleness}"
        axes.set_title(f"{name}: idle, all steps: {idle}", loc="left", fontsize=9, fontweight="bold")
    panels[len(levels) - 1].set_xlabel("seconds", fontsize=8)
    _speeds(panels[-1], record, levels)
    figure.savefig(out, dpi=140)
    plt.close(figure)


def _timeline(axes: Axes, run: Activity, window: float) -> None:
    """Draws the rows of a run. The height of the engine's row is the number of running groups."""
    most = max(count for _, count in run.running)
    times = [now - run.begin for now, _ in run.running]
    heights = [2.1 + 0.8 * count / most for _, count in run.running]
    axes.fill_between(times, 2.1, heights, step="post", color=COLOURS["engine"], linewidth=0)
    for row, part in ((1, "manager"), (0, "trainer")):
        bars = [(start - run.begin, max(end - start, 0.004)) for start, end in run.spans[part]]
        axes.broken_barh(bars, (row + 0.1, 0.8), color=COLOURS[part], linewidth=0)
    axes.set_yticks((0.5, 1.5, 2.5), ("trainer", "manager", f"engine\n(to {most} groups)"), fontsize=8)
    axes.set_xlim(0, window)
    axes.set_ylim(0, 3)
    axes.tick_params(axis="x", labelsize=8)
    axes.tick_params(axis="y", length=0)
    _plain(axes)


def _speeds(axes: Axes, record: dict[str, Any], levels: Sequence[int]) -> None:
    base = {run["seed"]: run["tokens_per_s"] for run in record["runs"] if run["staleness"] == 0}
    for row, staleness in enumerate(levels):
        ratios = [
            run["tokens_per_s"] / base[run["seed"]] for run in record["runs"] if run["staleness"] == staleness
        ]
        bound = record["bounds"][str(staleness)]
        axes.barh(row - 0.18, statistics.mean(ratios), 0.34, color=COLOURS["measured"])
        axes.barh(row + 0.2, bound, 0.3, color=COLOURS["bound"])
        axes.plot(ratios, [row - 0.18] * len(ratios), "|", color="black", markersize=9)
        axes.text(
            statistics.mean(ratios) + 0.06,
            row - 0.18,
            f"{statistics.mean(ratios):.2f}",
            va="center",
            fontsize=8,
        )
        axes.text(bound + 0.03, row + 0.2, f"{bound:.2f}", va="center", fontsize=8)
    axes.set_yticks(range(len(levels)), [f"staleness {level}" for level in levels], fontsize=8)
    axes.invert_yaxis()
    axes.tick_params(axis="x", labelsize=8)
    axes.tick_params(axis="y", length=0)
    axes.set_title(
        "Tokens per second, synchronous = 1. Blue: measured (line: a seed). Grey: bound of the queue",
        loc="left",
        fontsize=9,
        fontweight="bold",
    )
    _plain(axes)


def _plain(axes: Axes) -> None:
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("record", type=Path, help="the JSON file of stream_speed.py --out")
    parser.add_argument("--work", type=Path, default=Path("runs/stream_speed"), help="the folder of its runs")
    parser.add_argument("--warm-up", type=int, default=2, help="the first steps, which do not count")
    parser.add_argument("--out", type=Path, default=Path("stream_idle.png"))
    arguments = parser.parse_args(argv)
    record = json.loads(arguments.record.read_text(encoding="utf-8"))
    first = record["runs"][0]["seed"]
    runs = {
        run["staleness"]: activity(
            arguments.work / f"staleness-{run['staleness']}-seed-{first}", arguments.warm_up
        )
        for run in record["runs"]
        if run["seed"] == first
    }
    draw(record, runs, arguments.out)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
