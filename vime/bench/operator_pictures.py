"""Bars of what an operator and its contenders took, with their spread. Owns the picture, computes no verdict."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from vime.bench.operators import Case, Match, ran_kernel, short_name
from vime.bench.record import RL_KERNEL
from vime.bench.verdicts import number
from vime.plot import COLOURS, dress, legend

MOST_BAR = 4.0
"""A bar's length in lengths of our longest, at which it is cut: a slow one would flatten all others."""
OURS, OTHERS = COLOURS[1], COLOURS[0]
LINE, GAP = 0.42, 0.5  # inches a bar, bars between groups


@dataclass(frozen=True)
class Bar:
    """Milliseconds of one contender; `mib` None where its memory was not measured."""

    name: str
    ours: bool
    median: float
    least: float
    most: float
    mib: float | None


@dataclass(frozen=True)
class Group:
    """Bars that do the same work. `floor_ms`: what none of them can beat."""

    bars: tuple[Bar, ...]
    floor_ms: float | None


def groups_of(case: Case) -> list[Group]:
    """All that a picture of the case is drawn from: rows of rl_kernel first, then the others, fastest first."""
    work: dict[Any, list[Match]] = {}
    names = {match.ours["name"] for match in case.matches}
    for match in case.matches:
        if f"{match.ours['name']}+backward" in names:
            continue  # a forward stands in the table; its bars beside those of both passes would be twice the page
        what = (match.rival["phase"], match.rival["entropy"]) if case.floor_ms else match.ours["name"]
        work.setdefault(what, []).append(match)
    found = []
    for matches in work.values():
        ours = {match.ours["name"]: match.ours for match in matches}
        others = {match.rival["name"]: match.rival for match in matches}
        floor = case.floor_ms
        if floor is not None and matches[0].rival["phase"] == "forward":
            floor /= 3  # one product of three
        bars = [_bar(row, True) for row in sorted(ours.values(), key=_median)]
        bars += [_bar(row, False) for row in sorted(others.values(), key=_median)]
        found.append(Group(tuple(bars), floor))
    return sorted(found, key=lambda group: group.bars[0].median)


def _median(row: dict[str, Any]) -> float:
    return row["ms"]["median"]


def _bar(row: dict[str, Any], ours: bool) -> Bar:
    name = short_name(row) if not ours or ran_kernel(row) else f"{row['name']} (no kernel)"
    ms = row["ms"]
    return Bar(name, ours, ms["median"], ms["min"], ms["max"], row.get("extra_mib"))


def case_picture(case: Case) -> Figure:
    """Medians from zero, whiskers from the least to the largest call; slow ones are cut and say their number."""
    groups = groups_of(case)
    count = sum(len(group.bars) for group in groups) + GAP * (len(groups) - 1)
    figure = Figure(figsize=(7.5, 1.3 + 0.5 * LINE * count), layout="constrained")
    axes = figure.subplots()
    bars = [bar for group in groups for bar in group.bars]
    cut = min(MOST_BAR * max(bar.median for bar in bars if bar.ours), 1.45 * max(bar.most for bar in bars))
    y, places = 0.0, []
    for group in groups:
        start = y
        for bar in group.bars:
            _draw(axes, bar, y, cut)
            places.append(y)
            y += 1
        if group.floor_ms is not None:
            axes.plot(2 * [group.floor_ms], [start - 0.5, y - 0.5], "--", color="black", linewidth=1)
        y += GAP
    axes.set_yticks(places, [bar.name for bar in bars], fontsize=7.5)
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(y - GAP - 0.4, -0.6)
    axes.set_xlim(0, cut)
    axes.set_xlabel("time of a call (ms)")
    dress(axes, case.shape if case.floor_ms is None else case.name)
    handles: list[Any] = [Patch(color=OURS, label=RL_KERNEL), Patch(color=OTHERS, label="others")]
    if any(group.floor_ms is not None for group in groups):
        handles.append(
            Line2D([], [], color="black", linestyle="--", linewidth=1, label="matrix products alone")
        )
    legend(axes, handles, columns=3)
    told = "whiskers: least to largest call; beside a bar its median"
    told += ", its memory beyond inputs and gradients" if any(bar.mib is not None for bar in bars) else ""
    figure.supxlabel(f"{told}; an arrow: beyond the axis", fontsize=8, color="#555555")
    return figure


def _draw(axes: Any, bar: Bar, y: float, cut: float) -> None:
    axes.barh(y, min(bar.median, cut), 0.74, color=OURS if bar.ours else OTHERS)
    text = f"{number(bar.median)} ms{_gib(bar.mib)}"
    place = {"va": "center", "fontsize": 7.5}
    if bar.median > 0.7 * cut:
        arrow = " \N{RIGHTWARDS ARROW}" if bar.median > cut else ""
        axes.text(0.99 * min(bar.median, cut), y, text + arrow, ha="right", color="white", **place)
        return
    whisker = np.array([[bar.median - bar.least], [min(bar.most, cut) - bar.median]])
    axes.errorbar(bar.median, y, xerr=whisker, color="black", capsize=2.5, linewidth=1)
    axes.annotate(text, (min(bar.most, 0.7 * cut), y), (5, 0), textcoords="offset points", **place)


def _gib(mib: float | None) -> str:
    if mib is None:
        return ""
    return f", {mib / 1024:.1f} GiB" if mib >= 100 else f", {mib:.0f} MiB"
