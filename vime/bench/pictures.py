"""The PNGs of a benchmark report, in the look of `vime plot`. Owns what each one shows; computes no verdict.

A picture is drawn only where both sides have what it shows. Bars begin at zero. Whiskers and bands are named in the
picture: the standard deviation over repeats, or the interval of a difference.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from slime.tracking.metrics import LOGPROB_DIFF
from vime.bench.compare import Pair
from vime.bench.record import BASELINE, RL_KERNEL, SIDES, Record, Repeat
from vime.bench.statistics import LEVEL, Difference
from vime.bench.verdicts import ABOUT, PEAK, STEP, Comparison, is_shown, number
from vime.plot import COLOURS, LONG, PART_COLOURS, decades, dress, legend, save
from vime.run_metrics import Run, Series, running_mean, smoothing_window, step_times

SIDE_COLOURS = {BASELINE: COLOURS[0], RL_KERNEL: COLOURS[1]}
REWARD = "rollout/raw_reward"
WIDTH = 7.5  # inches
LEVEL_TEXT = f"{100 * LEVEL:.0f} %"


@dataclass(frozen=True)
class Picture:
    file: str
    caption: str


def draw_pictures(
    record: Record, pairs: Sequence[Pair], found: Sequence[Comparison], out: Path, prefix: str
) -> tuple[list[Picture], list[str]]:
    """Write `prefix`-*.png to `out`; returns (what was written, what was not drawn and why)."""
    pictures, notes = [], []
    for name, (caption, figure) in figures(record, pairs, found).items():
        if isinstance(figure, str):
            notes.append(f"{caption}: not drawn, as {figure}")
        else:
            pictures.append(Picture(save(figure, out / f"{prefix}-{name}.png").name, caption))
    return pictures, notes


def figures(
    record: Record, pairs: Sequence[Pair], found: Sequence[Comparison]
) -> dict[str, tuple[str, Figure | str]]:
    """Name -> (caption, the picture, or why there is none)."""
    both = {c.metric.name: c for c in found if not c.missing and not c.small}
    wanted: list[tuple[str, str, Figure | str]] = [
        ("differences", _differences_title(found), _differences(list(both.values())))
    ]
    missing = {c.metric.name: c.missing for c in found}
    about = ABOUT[record.tier]
    what = "a step" if about == STEP else "training"
    lines = ((about, f"time of {what} (s)"), (REWARD, "mean reward"), (LOGPROB_DIFF, "|difference| (nats)"))
    steps = {
        name: _steps(record, pairs, name, ylabel) if name in both else _absent(name, missing)
        for name, ylabel in lines
    }
    bars = _bars([both[about]]) if about in both else _absent(about, missing)
    wanted += [
        ("step_time", f"Mean time of {what}", bars),
        ("step_time_steps", f"Time of {what}, over the steps", steps[about]),
        ("time_breakdown", "Where the time of a step goes", _breakdown(record, pairs)),
        ("peak_memory", "Peak memory by phase", _peaks(both)),
        ("raw_reward", "raw_reward", steps[REWARD]),
        ("logprob_diff", "train_rollout_logprob_abs_diff", steps[LOGPROB_DIFF]),
    ]
    for _, caption, figure in wanted:
        if not isinstance(figure, str):
            figure.axes[0].set_title(caption, loc="left", fontsize=11, fontweight="bold")
    return {name: (caption, figure) for name, caption, figure in wanted}


def _absent(name: str, missing: dict[str, list[str]]) -> str:
    return f"{name} was not recorded by {' and '.join(missing.get(name, SIDES))}"


def _figure(height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    return figure, figure.subplots()


def _say(figure: Figure, text: str) -> None:
    """What marks and whiskers are, below the axes."""
    figure.supxlabel(text, fontsize=8, color="#555555")


def _name_sides(axes: Axes) -> None:
    legend(axes, [Patch(color=SIDE_COLOURS[side], label=side) for side in SIDES], columns=2)


def _repeats_text(repeats: int) -> str:
    if repeats == 1:
        return "one repeat a side: no spread to show"
    return f"dots: the mean of each of {repeats} repeats; whiskers: ± their standard deviation"


def _bars(found: Sequence[Comparison]) -> Figure:
    """One row of two bars a metric, all of one unit, from zero; the repeats as dots on them."""
    figure, axes = _figure(1.35 + 0.72 * len(found))
    top = max(max(summary.repeats) for c in found for summary in c.sides.values() if summary)
    for row, c in enumerate(found):
        for i, side in enumerate(SIDES):
            summary = c.sides[side]
            assert summary is not None, "only metrics of both sides are drawn"
            y = row + (i - 0.5) * 0.36
            axes.barh(y, summary.mean, 0.32, color=SIDE_COLOURS[side])
            if summary.spread is not None:
                axes.errorbar(summary.mean, y, xerr=summary.spread, color="black", capsize=3, linewidth=1)
                heights = y + np.linspace(-0.11, 0.11, len(summary.repeats))
                look = {"markersize": 4, "markeredgecolor": "white", "markeredgewidth": 0.6}
                axes.plot(summary.repeats, heights, "o", color="black", **look)
            end = max(*summary.repeats, summary.mean + (summary.spread or 0))
            place = {"textcoords": "offset points", "va": "center", "fontsize": 8}
            axes.annotate(number(summary.mean), (end, y), (5, 0), **place)
    axes.set_yticks(range(len(found)), [c.metric.label.removesuffix(", peak memory") for c in found])
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(found) - 0.4, -0.6)
    axes.set_xlim(0, 1.14 * top)
    axes.set_xlabel(f"mean ({found[0].metric.unit})")
    dress(axes, "")
    _name_sides(axes)
    _say(figure, _repeats_text(max(len(s.repeats) for c in found for s in c.sides.values() if s)))
    return figure


def _peaks(both: dict[str, Comparison]) -> Figure | str:
    found = [c for name, c in both.items() if name.endswith(PEAK)]
    return (
        _bars(found) if found else "no peak of a phase was recorded by both sides (there are none on a CPU)"
    )


def _differences_title(found: Sequence[Comparison]) -> str:
    some = any(c.difference is not None and c.difference.low is not None for c in found)
    return f"Differences with {LEVEL_TEXT} intervals" if some else "Differences, too few runs for intervals"


def _differences(found: Sequence[Comparison]) -> Figure | str:
    """Relative differences of all metrics that have one, with their intervals, around zero."""
    shown = [(c, c.difference) for c in found if c.difference is not None and c.difference.relative]
    if not shown:
        return "no time, speed or memory was recorded by both sides"
    figure, axes = _figure(1.5 + 0.3 * len(shown))
    left, right = _span([d for _, d in shown])
    axes.axvline(0, color="#8C8C8C", linewidth=1)
    for row, (c, d) in enumerate(shown):
        differs = is_shown(c.metric, d)
        good = c.metric.better is not None and (d.value > 0) == c.metric.better
        colour = "#4D4D4D" if not differs or c.metric.better is None else COLOURS[2] if good else COLOURS[1]
        axes.plot(100 * np.array(d.pairs), [row] * len(d.pairs), ".", color="#8C8C8C", markersize=5, zorder=1)
        if d.low is not None and d.high is not None:
            ends = [100 * d.low, 100 * d.high]
            axes.plot(ends, [row, row], color=colour, linewidth=2.2, solid_capstyle="butt")
        look = {"color": colour, "markersize": 6, "fillstyle": "full" if differs else "none"}
        axes.plot(100 * d.value, row, "o", **look)
        if not left <= 100 * d.value <= right:
            text, beyond = f"{100 * d.value:+.0f} %", d.value > 0
            place = {"va": "center", "ha": "right" if beyond else "left", "fontsize": 8, "color": colour}
            axes.text(right if beyond else left, row, f"{text} →" if beyond else f"← {text}", **place)
    axes.set_xlim(left, right)
    axes.set_yticks(range(len(shown)), [f"{c.metric.label} ({c.metric.unit})" for c, _ in shown], fontsize=8)
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(shown) - 0.4, -0.6)
    axes.set_xlabel(f"{RL_KERNEL} against {BASELINE} (%)")
    dress(axes, "")
    _say(
        figure,
        f"lines: {LEVEL_TEXT} interval over repeats (unseen: narrow, or none); small dots: pairs of repeats\n"
        "filled: away from zero; green: better, orange: worse, grey: cause not shown, or neither is better",
    )
    return figure


def _span(found: Sequence[Difference]) -> tuple[float, float]:
    """The x-axis in percent: with zero and every difference but those beyond three times what most of them reach."""
    reach = [100 * max(abs(x) for x in (d.value, d.low or 0, d.high or 0)) for d in found]
    most = max(3 * float(np.percentile(reach, 75)), 1.0)
    ends = [0.0, *(100 * x for d in found for x in (d.value, d.low, d.high, *d.pairs) if x is not None)]
    low, high = max(min(ends), -most), min(max(ends), most)
    margin = 0.06 * (high - low)
    return low - margin, high + margin


def _values(repeat: Repeat, name: str) -> np.ndarray:
    return np.array([step.get(name, np.nan) for step in repeat.steps], dtype=np.float64)


def _steps(record: Record, pairs: Sequence[Pair], name: str, ylabel: str) -> Figure:
    """A metric over the steps: each repeat thin, the mean over repeats bold. The axis fits the steps that count."""
    figure, axes = _figure(3.6)
    length = max(len(repeat.steps) for pair in pairs for repeat in pair)
    rows = np.full((len(SIDES), len(pairs), length), np.nan)
    for i, r in np.ndindex(rows.shape[:2]):
        rows[i, r, : len(pairs[r][i].steps)] = _values(pairs[r][i], name)
    counted = rows[..., record.warm_up :]
    if name == LOGPROB_DIFF:
        decades(axes, counted)
    else:
        low, high = float(np.nanmin(counted)), float(np.nanmax(counted))
        margin = 0.08 * (high - low) or 0.05 * abs(high) or 1.0
        axes.set_ylim(low - margin, high + margin)
    bottom, top = axes.get_ylim()
    warm = rows[..., : record.warm_up]
    warm[(warm < bottom) | (warm > top)] = np.nan
    window = smoothing_window(length) if length > LONG else 1
    for side, repeats, under in zip(SIDES, rows, (1.4, 0.0), strict=True):  # equal curves: both are seen
        colour, some = SIDE_COLOURS[side], np.isfinite(repeats).any(axis=0)
        mean = np.full(length, np.nan)
        mean[some] = np.nanmean(repeats[:, some], axis=0)
        if len(repeats) > 1 or window > 1:
            axes.plot(repeats.T, color=colour, alpha=0.4, linewidth=0.8)
        marker = "o" if length - record.warm_up == 1 else None
        bold = running_mean(mean, window) if window > 1 else mean
        axes.plot(bold, color=colour, linewidth=1.8 + under, marker=marker, markersize=4)
    if record.warm_up:
        axes.axvspan(-0.5, record.warm_up - 0.5, color="#EFEFEF", zorder=0)
    axes.set_xlim(-0.5, length - 0.5)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=8, steps=[1, 2, 5, 10], integer=True))
    axes.set_xlabel("step")
    axes.set_ylabel(ylabel)
    dress(axes, "")
    _name_sides(axes)
    _say(figure, _steps_text(len(pairs), window, record.warm_up))
    return figure


def _steps_text(repeats: int, window: int, warm_up: int) -> str:
    told = [f"thin: {repeats} repeats; bold: their mean"] if repeats > 1 else ["one repeat a side"]
    if window > 1:
        told.append(f"bold: running mean over {window} steps")
    if warm_up:
        told.append("grey: warm-up, which counts for nothing; values beyond the axis are left out")
    return "; ".join(told)


def _mean_parts(record: Record, repeats: Sequence[Repeat]) -> dict[str, float] | None:
    """Part of a step -> mean seconds, over steps and then repeats; None when a repeat timed no part."""
    found = []
    for repeat in repeats:
        steps = repeat.steps[record.warm_up :]
        series = {
            name: Series(
                np.array([i for i, step in enumerate(steps) if name in step]),
                np.array([step[name] for step in steps if name in step], dtype=np.float64),
                "step",
            )
            for name in {name for step in steps for name in step}
        }
        times = step_times(Run(repeat.run, series))
        if times is None:
            return None
        found.append({part: float(seconds.mean()) for part, seconds in times.parts.items()})
    return {part: float(np.mean([each.get(part, 0.0) for each in found])) for part in PART_COLOURS}


def _breakdown(record: Record, pairs: Sequence[Pair]) -> Figure | str:
    parts = {side: _mean_parts(record, [pair[i] for pair in pairs]) for i, side in enumerate(SIDES)}
    untimed = [side for side in SIDES if parts[side] is None]
    if untimed:
        return f"the parts of a step were not recorded by {' and '.join(untimed)}"
    figure, axes = _figure(3.0)
    left = np.zeros(len(SIDES))
    handles = []
    for part, colour in PART_COLOURS.items():
        seconds = np.array([(parts[side] or {})[part] for side in SIDES])
        if seconds.any():
            axes.barh(range(len(SIDES)), seconds, 0.5, left, color=colour)
            handles.append(Patch(color=colour, label=part))
            left += seconds
    for row, total in enumerate(left):
        place = {"textcoords": "offset points", "va": "center", "fontsize": 8}
        axes.annotate(f"{number(total)} s", (total, row), (5, 0), **place)
    axes.set_yticks(range(len(SIDES)), SIDES)
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(SIDES) - 0.5, -0.5)
    axes.set_xlim(0, 1.14 * left.max())
    axes.set_xlabel("mean of a step (s); beside each bar the sum of its parts")
    dress(axes, "")
    figure.legend(handles=handles, frameon=False, fontsize=8, loc="outside right center")
    _say(
        figure,
        "where the head's log-probs count depends on the path: compare forward + policy loss + backward",
    )
    return figure
