"""Draws the data of `vime watch` as lines of text for a width and a height in characters, independent of a terminal."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence

from rich.text import Text

from slime.roles.served import POLICY
from slime.tracking.run_engines import EngineRecord
from slime.tracking.run_summary import RunSummary
from vime.doctor.finding import one_line
from vime.doctor.post_mortem import find_cause
from vime.members.table import ENDED, GONE
from vime.view.watch_data import Curve, Look, Points, SlowSample

STATES = {
    "running": ("running", "bold black on green"),
    "finished": ("finished", "bold black on cyan"),
    "interrupted": ("interrupted", "bold black on yellow"),
    "failed": ("failed", "bold white on red"),
}
_BLANK = 0x2800
_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
"""Bits of the dots of a braille character: two columns of four dots, from the top."""
_LABEL = 10


def head(run: str, look: Look, width: int) -> list[Text]:
    """Returns lines of `width` characters: state, progress and time of the run, its current phase, and why it
    failed."""
    summary = look.summary
    text, style = STATES[summary.state]
    done = 0 if summary.rollout is None else summary.rollout + 1
    line = Text.assemble(
        (f" {text} ", style),
        f" {one_line(run)}  ",
        (f"{done}/{summary.rollouts or '?'}", "bold"),
        " rollouts ",
    )
    line.append(bar(summary.progress, max(8, width // 8)), "green")
    line.append(f" {100 * summary.progress:3.0f}%")
    if summary.step_s is not None:
        line.append(f"  step {seconds(summary.step_s)}")
    if summary.eta_s is not None:
        line.append(f"  left {seconds(summary.eta_s)}", "bold")
    cause = [part for line in [*_cause(summary), *_damaged(summary)] for part in _wrapped(line, width)]
    return [_cut(line, width), _cut(_second(look), width), *cause]


def _second(look: Look) -> Text:
    """Returns a line with the current phase, or the time of the end, and the newest scores."""
    summary, line = look.summary, Text()
    if summary.state == "running":
        innermost = {(phase.source, phase.device): phase for phase in summary.doing}
        named = sorted((source, phase.name) for (source, _), phase in innermost.items())
        doing = ", ".join(source if source == name else f"{source} {name}" for source, name in named)
        silent = seconds(max(0.0, time.time() - summary.updated))
        line.append(f"now: {one_line(doing) or 'nothing'}; newest event {silent} ago")
    else:
        ended = time.strftime("%F %T", time.localtime(summary.updated))
        line.append(f"newest event {ended}; ran {seconds(summary.updated - summary.started)}")
    for name, points in look.scores.items():
        step = max(points)
        line.append(f"; {one_line(name)} {points[step]:.3g} after {step}", "cyan")
    return line


def _cause(summary: RunSummary) -> list[Text]:
    if not summary.cause:
        return []
    if summary.state != "failed":
        return [Text(one_line(summary.cause), "yellow")]
    cause = find_cause(summary)
    cause_text = Text.assemble((f"{cause.name}: ", "bold red"), one_line(summary.cause))
    return [cause_text, Text(f"remedy: {cause.remedy}", "red")]


def _damaged(summary: RunSummary) -> list[Text]:
    damaged = ", ".join(
        f"{count} damaged lines in {name}" for name, count in summary.damaged.items() if count
    )
    return [Text(f"left out: {damaged}", "yellow")] if damaged else []


def bar(share: float, width: int) -> str:
    full = round(share * width)
    return "█" * full + "░" * (width - full)


def curve(shown: Curve, points: Points | None, width: int, height: int) -> list[Text]:
    """Returns a title with the steps and the newest value, and a plot with its largest and smallest value at the
    left."""
    title = Text(shown.title, "bold")
    if not points:
        return [_cut(title, width), Text("not recorded so far", "dim")]
    newest = points[max(points)]
    value, steps = format(newest, shown.spec), f"  {min(points)} to {max(points)}"
    title.truncate(max(1, width - len(value) - 1), overflow="ellipsis")
    if len(title) + len(steps) + len(value) < width:
        title.append(steps, "not bold dim")
    title.append(" " * max(1, width - len(title) - len(value)))
    title.append(value, "bold green" if math.isfinite(newest) else "bold white on red")
    means = column_means(points, 2 * (width - _LABEL))
    if not means or height < 2:
        return [_cut(title, width)]
    low, high = min(means.values()), max(means.values())
    rows = plot(means, width - _LABEL, height - 1)
    labels = {0: format(high, shown.spec), len(rows) - 1: format(low, shown.spec)}
    lines = [
        Text.assemble((f"{labels.get(i, '')[: _LABEL - 1]:>{_LABEL - 1}}│", "dim"), (row, "green"))
        for i, row in enumerate(rows)
    ]
    return [_cut(title, width), *lines]


def column_means(points: Mapping[int, float], columns: int) -> dict[int, float]:
    """Maps a plot's column to the mean over its steps. Values that are not finite are left out."""
    first, last = min(points), max(points)
    count = min(columns, last - first + 1)
    found: dict[int, list[float]] = {}
    for step, value in points.items():
        if math.isfinite(value):
            column = (step - first) * count // (last - first + 1)
            if 1 < count < columns:  # few steps fill the whole width
                column = round(column * (columns - 1) / (count - 1))
            found.setdefault(column, []).append(value)
    return {column: math.fsum(values) / len(values) for column, values in sorted(found.items())}


def plot(means: Mapping[int, float], width: int, height: int) -> list[str]:
    """Draws values by column as a braille line: `height` lines of `width` characters. A character is two columns wide
    and four dots high."""
    low, high, rows = min(means.values()), max(means.values()), 4 * height
    cells = [[_BLANK] * width for _ in range(height)]
    before: tuple[int, int] | None = None
    for x, value in means.items():
        share = 0.5 if high == low else (value - low) / (high - low)
        here = (x, round((1 - share) * (rows - 1)))
        for dot in _line(before or here, here):
            cells[dot[1] // 4][dot[0] // 2] |= _DOTS[dot[0] % 2][dot[1] % 4]
        before = here
    return ["".join(map(chr, row)) for row in cells]


def _line(begin: tuple[int, int], end: tuple[int, int]) -> list[tuple[int, int]]:
    """Returns the dots of a line between two dots."""
    steps = max(abs(end[0] - begin[0]), abs(end[1] - begin[1]), 1)
    return [
        (begin[0] + round(i * (end[0] - begin[0]) / steps), begin[1] + round(i * (end[1] - begin[1]) / steps))
        for i in range(steps + 1)
    ]


def engines(summary: RunSummary, width: int) -> list[Text]:
    """Returns a line for each engine. Engines that do not serve come first, then those with the longest queue."""
    ended = summary.state != "running"
    found = [engine for engine in summary.engines.values() if engine.state not in GONE]
    serving = sum(engine.state == "serving" for engine in found)
    title = f"engines: {len(found)}" if ended else f"engines: {serving} of {len(found)} serve"
    found.sort(key=lambda one: (one.state == "serving", -(one.waiting or 0), -(one.kv_cache or 0)))
    name_width = max(10, min(24, width - 36))
    header = " " * name_width + f" {'state':<9}{'ver':>5}{'cache':>6}{'run':>4}{'wait':>5}{'died':>5}"
    lines = [_engine(engine, ended, summary.deaths[engine.name], name_width) for engine in found]
    return [Text(title, "bold"), *(_cut(line, width) for line in [Text(header, "dim"), *lines])]


def _engine(engine: EngineRecord, ended: bool, deaths: int, name_width: int) -> Text:
    state = ENDED if ended else engine.state
    style = {"serving": "", ENDED: "", "starting": "bold yellow"}.get(state, "bold red")
    name = one_line(engine.name if engine.model == POLICY else f"{engine.model} {engine.name}")
    line = Text.assemble(f"{name[:name_width]:{name_width}} ", (f"{state:<9}", style))
    counts = (None, None) if ended else (engine.running, engine.waiting)
    cache = "-" if ended or engine.kv_cache is None else f"{100 * engine.kv_cache:.0f}%"
    running, waiting = ("-" if count is None else str(count) for count in counts)
    version = "-" if engine.version is None else str(engine.version)
    line.append(f"{version:>5}{cache:>6}{running:>4}{waiting:>5}")
    return line.append(f"{deaths or '':>5}", "red")


def slow_samples(samples: Sequence[SlowSample], width: int) -> list[Text]:
    lines = [
        Text("slowest samples", "bold"),
        Text(f"{'seconds':>8}{'tokens':>8}{'sample':>8}{'group':>7}", "dim"),
    ]
    for one in samples:
        rest = "".join(f"{'-' if value is None else value:>8}" for value in (one.tokens, one.sample))
        line = Text(f"{one.seconds:8.2f}{rest}{one.group:>7}")
        if one.goes_on:
            line.append(" goes on", "yellow")
        lines.append(_cut(line, width))
    return lines if samples else [lines[0], Text("no group has ended so far", "dim")]


def warnings(summary: RunSummary, width: int) -> list[Text]:
    """Returns a line per warning, the newest first."""
    lines = [Text(f"warnings: {len(summary.warnings)}", "bold yellow" if summary.warnings else "bold")]
    for event in reversed(summary.warnings[-200:]):
        when = time.strftime("%T", time.localtime(event.time))
        lines.append(
            _cut(Text.assemble((f"{when} {one_line(event.source)} ", "dim"), one_line(event["text"])), width)
        )
    return lines


def seconds(value: float) -> str:
    """Formats seconds: 3.2 s, 4:05 (minutes), 2:04:05 (hours)."""
    if value < 60:
        return f"{value:.1f} s"
    minutes, rest = divmod(round(value), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _cut(line: Text, width: int) -> Text:
    line.truncate(max(1, width), overflow="ellipsis")
    line.no_wrap = True
    return line


def _wrapped(line: Text, width: int) -> list[Text]:
    """Wraps a line to at most two lines."""
    if len(line) <= width:
        return [line]
    cut = line.plain.rfind(" ", 0, width)
    first, rest = line.divide([cut if cut > 0 else width])
    return [first, _cut(rest, width)]


def joined(lines: Sequence[Text]) -> Text:
    return Text("\n").join(lines)
