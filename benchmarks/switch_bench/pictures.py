"""The pictures of a report, in the style of `vime plot`: differences, and the parts of a step.

switch_bench.curves draws the other pictures.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from switch_bench import curves
from switch_bench.compare import Pair
from switch_bench.record import BASELINE, RL_KERNEL, Record, Repeat
from switch_bench.verdicts import Comparison, verdict
from vime.view.measures import number
from vime.view.plot import COLOURS, PART_COLOURS, dress, save
from vime.view.run_metrics import RunMetrics, Series, step_times
from vime.view.statistics import LEVEL, Difference


def draw_pictures(
    record: Record, pairs: Sequence[Pair], found: Sequence[Comparison], out: Path, prefix: str
) -> tuple[dict[str, Path], list[str]]:
    """Writes `prefix`-*.png to `out`. Returns ({caption: path}, notes about missing pictures)."""
    interval = f"with {100 * LEVEL:.0f} % intervals" if len(pairs) > 2 else "of too few runs for intervals"
    sides = curves.sides_of(pairs)
    figures = {
        "differences": (f"Differences {interval}", differences(found)),
        "mean_step_time": ("Mean step time", curves.mean_step_time(record.warm_up, sides)),
        "step_time": ("Step time over steps", curves.step_time(record.warm_up, sides)),
        "time_breakdown": ("Where the time of a step goes", breakdown(record.warm_up, sides)),
        "peak_memory": ("Peak memory", curves.peak_memory(record.warm_up, sides)),
        "raw_reward": ("Raw reward", curves.raw_reward(record.warm_up, sides)),
        "logprob_diff": (
            "Log-prob difference of trainer and engine",
            curves.logprob_diff(record.warm_up, sides),
        ),
    }
    written, notes = {}, []
    for name, (caption, figure) in figures.items():
        if isinstance(figure, str):
            notes.append(f"{caption}: not drawn, as {figure}")
            continue
        figure.axes[0].set_title(caption, loc="left", fontsize=11, fontweight="bold")
        written[caption] = save(figure, out / f"{prefix}-{name}.png")
    return written, notes


def _say(figure: Figure, text: str) -> None:
    """Writes a legend of the marks below the axes."""
    figure.supxlabel(text, fontsize=8, color="#555555")


def differences(found: Sequence[Comparison]) -> Figure | str:
    """Draws all relative differences with their intervals, around zero. Returns the reason if there are no
    differences."""
    shown = [(c, c.difference) for c in found if c.difference is not None and c.difference.relative]
    if not shown:
        return "no time, speed or memory was recorded by both sides"
    figure, axes = curves.plain_figure(1.5 + 0.3 * len(shown))
    left, right = _span([d for _, d in shown])
    axes.axvline(0, color="#8C8C8C", linewidth=1)
    for row, (c, d) in enumerate(shown):
        _difference(axes, row, c, d, (left, right))
    axes.set_xlim(left, right)
    axes.set_yticks(range(len(shown)), [f"{c.metric.label} ({c.metric.unit})" for c, _ in shown], fontsize=8)
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(shown) - 0.4, -0.6)
    axes.set_xlabel(f"{RL_KERNEL} compared with {BASELINE} (%)")
    dress(axes, "")
    _say(
        figure,
        "lines: interval over repeats; small dots: pairs of repeats\n"
        "filled: a difference is shown; green: better, orange: worse, grey: neither, or not shown",
    )
    return figure


def _difference(axes: Axes, row: int, c: Comparison, d: Difference, ends: tuple[float, float]) -> None:
    """Draws one row: the pairs, the interval and the mean. A mean beyond the axis is a number with an arrow."""
    differs = verdict(c.metric, d)[1]
    good = c.metric.better is not None and (d.value > 0) == c.metric.better
    colour = "#4D4D4D" if not differs or c.metric.better is None else COLOURS[2] if good else COLOURS[1]
    axes.plot(100 * np.array(d.pairs), [row] * len(d.pairs), ".", color="#8C8C8C", markersize=5, zorder=1)
    if d.low is not None and d.high is not None:
        line = [100 * d.low, 100 * d.high]
        axes.plot(line, [row, row], color=colour, linewidth=2.2, solid_capstyle="butt")
    axes.plot(100 * d.value, row, "o", color=colour, markersize=6, fillstyle="full" if differs else "none")
    if not ends[0] <= 100 * d.value <= ends[1]:
        beyond = d.value > 0
        text = f"{100 * d.value:+.0f} %"
        place, side = (ends[1], "right") if beyond else (ends[0], "left")
        text = f"{text} →" if beyond else f"← {text}"
        axes.text(place, row, text, va="center", ha=side, fontsize=8, color=colour)


def _span(found: Sequence[Difference]) -> tuple[float, float]:
    """Returns the range of the x-axis in percent. It has zero and all differences except outliers."""
    reach = [100 * max(abs(x) for x in (d.value, d.low or 0, d.high or 0)) for d in found]
    most = max(3 * float(np.percentile(reach, 75)), 1.0)
    ends = [0.0, *(100 * x for d in found for x in (d.value, d.low, d.high, *d.pairs) if x is not None)]
    low, high = max(min(ends), -most), min(max(ends), most)
    margin = 0.06 * (high - low)
    return low - margin, high + margin


def _mean_parts(warm_up: int, repeats: Sequence[Repeat]) -> dict[str, float] | None:
    """Returns part of a step -> mean seconds, over steps and then repeats; None if a repeat timed no part."""
    found = []
    for repeat in repeats:
        steps = repeat.steps[warm_up:]
        series = {
            name: Series(
                np.array([i for i, step in enumerate(steps) if name in step]),
                np.array([step[name] for step in steps if name in step], dtype=np.float64),
                "step",
            )
            for name in {name for step in steps for name in step}
        }
        times = step_times(RunMetrics(repeat.run, series))
        if times is None:
            return None
        found.append({part: float(seconds.mean()) for part, seconds in times.parts.items()})
    return {part: float(np.mean([each.get(part, 0.0) for each in found])) for part in PART_COLOURS}


def breakdown(warm_up: int, sides: curves.Sides) -> Figure | str:
    """Draws one bar per side, from zero, with the mean seconds per part of a step. Returns a reason without times."""
    parts = {side: _mean_parts(warm_up, repeats) for side, repeats in sides.items()}
    if untimed := [side for side in sides if parts[side] is None]:
        return f"the parts of a step were not recorded by {' and '.join(untimed)}"
    figure, axes = curves.plain_figure(1.8 + 0.6 * len(sides))
    left = np.zeros(len(sides))
    handles = []
    for part, colour in PART_COLOURS.items():
        seconds = np.array([(parts[side] or {})[part] for side in sides])
        if seconds.any():
            axes.barh(range(len(sides)), seconds, 0.5, left, color=colour)
            handles.append(Patch(color=colour, label=part))
            left += seconds
    for row, total in enumerate(left):
        axes.annotate(
            f"{number(total)} s", (total, row), (5, 0), textcoords="offset points", va="center", fontsize=8
        )
    axes.set_yticks(range(len(sides)), list(sides))
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(sides) - 0.5, -0.5)
    axes.set_xlim(0, 1.14 * left.max())
    axes.set_xlabel("mean of a step (s); beside each bar the sum of its parts")
    dress(axes, "")
    figure.legend(handles=handles, frameon=False, fontsize=8, loc="outside right center")
    _say(
        figure,
        "the head's log-probs are in the forward or in the policy loss: compare their sum and backward",
    )
    return figure
