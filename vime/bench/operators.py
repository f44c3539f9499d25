"""operators.json of `vime bench op` (rl_kernel.bench) as a section of the report: each implementation against ours.

The file has the median, least and largest time of a contender's calls, which took turns in one process, and not the
calls: there is nothing to pair and no interval. A difference counts as shown when the ranges of the two lie apart.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from vime.bench.record import BASELINE, RL_KERNEL, SIDES
from vime.bench.verdicts import number
from vime.bench.where import facts, folded
from vime.plot import COLOURS, dress, legend, save

OPERATORS_FILE = "operators.json"
SCHEMA = 1
MOST_BAR = 8.0
"""A bar's length in shortest bars, at which it is cut: a slow one would flatten all others."""


@dataclass(frozen=True)
class Match:
    """Another implementation beside the fastest row of ours that does the same in no more memory."""

    rival: dict[str, Any]
    ours: dict[str, Any]

    @property
    def verdict(self) -> str:
        rival, ours = self.rival["ms"], self.ours["ms"]
        if ours["max"] < rival["min"]:
            return "faster"
        return "slower" if ours["min"] > rival["max"] else "no difference shown (ranges overlap)"


@dataclass(frozen=True)
class Case:
    """One shape. `unmatched`: (rival, why it is compared with nothing of ours)."""

    name: str
    shape: str
    matches: list[Match]
    unmatched: list[tuple[str, str]]


def read_operators(directory: Path) -> dict[str, Any]:
    """The results in `directory`. ValueError when they are not of rl_kernel.bench."""
    path = directory / OPERATORS_FILE
    try:
        content = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} must be JSON, got {error}; measure again") from error
    if not isinstance(content, dict) or content.get("schema") != SCHEMA:
        raise ValueError(f"{path} must be of schema {SCHEMA}; measure again with this version")
    return content


def cases_of(content: dict[str, Any]) -> list[Case]:
    """What rl_kernel.bench matched with each other, case by case; rows that failed or are not valid with the reason."""
    found = []
    for result in content["linear"]:
        rows = {row["name"]: row for row in result["rows"]}
        case = result["case"]
        shape = f"{case['tokens']:,} tokens, hidden {case['hidden']:,}, vocabulary {case['vocab']:,}"
        pairs = dict.fromkeys((pair["rival"], pair["ours"]) for pair in result["comparisons"] if pair["ours"])
        matches = [Match(rows[rival], rows[ours]) for rival, ours in pairs]
        unmatched = [(pair["rival"], pair["note"]) for pair in result["comparisons"] if pair["ours"] is None]
        compared = {pair["rival"] for pair in result["comparisons"]}
        unmatched += [
            (row["name"], row["skipped"])
            for row in result["rows"]
            if "skipped" in row and row["name"] not in compared
        ]
        found.append(Case(case["name"], shape, matches, unmatched))
    return found


def operator_lines(content: dict[str, Any], out: Path, prefix: str, written: list[Path]) -> Iterator[str]:
    """The part of the report of one file; pictures go to `out`, and their paths to `written`."""
    machine = content["machine"]
    yield from ("", f"### rl_kernel.bench: {BASELINE} is another implementation, {RL_KERNEL} ours", "")
    yield from (f"- **{name}** {text}" for name, text in facts(machine))
    yield "- **Times** median (least to largest) of calls that took turns in one process; no pairs, no interval"
    yield from ("", "```bash", machine["command"], "```")
    for case in cases_of(content):
        yield from _case_lines(case)
        if case.matches:
            path = save(_picture(case), out / f"{prefix}-{case.name}.png")
            written.append(path)
            yield from ("", f"![{case.name}: time of a call]({path.name})")
    if content["elementwise"]:
        yield from _stream_lines(content["elementwise"])
    yield from _fallback_lines(content)
    yield from folded("Environment", machine)


def _case_lines(case: Case) -> Iterator[str]:
    yield from ("", f"#### {case.name}: {case.shape}", "")
    if case.matches:
        head = (
            BASELINE,
            RL_KERNEL,
            f"{BASELINE}, ms",
            f"{RL_KERNEL}, ms",
            "difference",
            "extra MiB of each",
            "verdict",
        )
        yield f"| {' | '.join(head)} |"
        yield "| --- | --- | ---: | ---: | ---: | ---: | --- |"
    for match in case.matches:
        rival, ours = match.rival, match.ours
        difference = 100 * (ours["ms"]["median"] / rival["ms"]["median"] - 1)
        memory = ", ".join(
            f"{row['extra_mib']:,.0f}" if "extra_mib" in row else "none" for row in (rival, ours)
        )
        words = match.verdict if match.verdict.startswith("no") else f"**{match.verdict}**"
        cells = [
            rival["name"],
            ours["name"],
            _time(rival),
            _time(ours),
            f"{difference:+.1f} %",
            memory,
            words,
        ]
        yield f"| {' | '.join(cells)} |"
    if not case.matches:
        yield (
            "No other implementation was measured beside ours."
            if not case.unmatched
            else "Nothing to compare:"
        )
    if case.unmatched:
        yield ""
    yield from (f"- {rival}: not compared, as {why}" for rival, why in case.unmatched)


def _time(row: dict[str, Any]) -> str:
    ms = row["ms"]
    return f"{number(ms['median'])} ({number(ms['min'])} to {number(ms['max'])})"


def _stream_lines(streams: dict[str, Any]) -> Iterator[str]:
    yield from ("", "#### Operators that move bytes", "")
    yield f"No other implementation beside them: held against a device copy, {streams['copy_gbs']:,} GB/s."
    yield from ("", "| row | ms | GB/s | of a copy | extra MiB |", "| --- | ---: | ---: | ---: | ---: |")
    for row in streams["rows"]:
        if "ms" not in row:
            yield f"| {row['name']} | {row['skipped']} | | | |"
            continue
        memory = f"{row['extra_mib']:,.1f}" if "extra_mib" in row else "none"
        yield f"| {row['name']} | {_time(row)} | {row['gbs']:,.0f} | {row['share']:.2f} | {memory} |"


def _fallback_lines(content: dict[str, Any]) -> Iterator[str]:
    rows = [row for result in content["linear"] for row in result["rows"]]
    rows += content["elementwise"]["rows"] if content["elementwise"] else []
    reasons: dict[str, list[str]] = {}
    for row in rows:
        for reason in row.get("fallbacks", []):
            reasons.setdefault(reason, []).append(row["name"])
    yield from ("", "#### Fallbacks", "")
    if not reasons:
        yield "No row of ours ran the reference instead of a kernel."
    for reason, names in reasons.items():
        yield f"- {', '.join(dict.fromkeys(names))}: ran the PyTorch reference ({reason})"


def _picture(case: Case) -> Figure:
    """Medians from zero, whiskers from the least to the largest; slow ones are cut and say their number."""
    figure = Figure(figsize=(7.5, 1.35 + 0.62 * len(case.matches)), layout="constrained")
    axes = figure.subplots()
    bars = [(m.rival["ms"], m.ours["ms"]) for m in case.matches]
    cut = min(
        MOST_BAR * min(ms["median"] for pair in bars for ms in pair),
        1.3 * max(ms["max"] for pair in bars for ms in pair),
    )
    for row, pair in enumerate(bars):
        for i, ms in enumerate(pair):
            y, beyond = row + (i - 0.5) * 0.36, ms["max"] > 0.85 * cut
            axes.barh(y, min(ms["median"], cut), 0.32, color=COLOURS[i])
            text, place = f"{number(ms['median'])} ms", {"va": "center", "fontsize": 8}
            if beyond and ms["median"] > 0.85 * cut:
                axes.text(0.99 * cut, y, f"{text} →", ha="right", color="white", fontweight="bold", **place)
                continue
            whisker = np.array([[ms["median"] - ms["min"]], [ms["max"] - ms["median"]]])
            axes.errorbar(ms["median"], y, xerr=whisker, color="black", capsize=3, linewidth=1)
            axes.annotate(text, (ms["max"], y), (5, 0), textcoords="offset points", **place)
    axes.set_yticks(
        range(len(bars)), [f"{m.rival['name']}\n{m.ours['name']}" for m in case.matches], fontsize=7
    )
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(bars) - 0.4, -0.6)
    axes.set_xlim(0, cut)
    axes.set_xlabel("time of a call (ms)")
    dress(axes, f"{case.name}: time of a call")
    legend(axes, [Patch(color=COLOURS[i], label=side) for i, side in enumerate(SIDES)], columns=2)
    figure.supxlabel(
        "whiskers: least to largest call; an arrow: beyond the axis", fontsize=8, color="#555555"
    )
    return figure


def has_operators(directory: Path) -> bool:
    return (directory / OPERATORS_FILE).is_file()
