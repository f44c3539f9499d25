"""Pictures of whole runs, with one colour per side: step times, memory, reward, log-prob difference.

`sides` has the repeats of each side or run. `warm_up` is the number of steps per repeat whose times do not count.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from slime.tracking.metrics import LOGPROB_DIFF
from switch_bench.compare import Pair
from switch_bench.record import SIDES, Repeat
from switch_bench.verdicts import PEAK, STEP, metric_of, values_of
from vime.view.measures import number
from vime.view.plot import COLOURS, draw_lines, draw_logprob_diff, draw_reward, dress, name_runs
from vime.view.run_metrics import UNITS, RunMetrics, Series
from vime.view.statistics import Array

WIDTH = 7.5  # inches
REWARD = "rollout/raw_reward"
PEAKS = tuple(f"perf/{part}{PEAK}" for part in ("trainer", "forward", "policy_loss", "backward", "optimizer"))
Sides: TypeAlias = Mapping[str, Sequence[Repeat]]
MIN_STEPS = 100
"""Smallest number of steps of a side for a 99th percentile."""


def sides_of(pairs: Sequence[Pair]) -> dict[str, list[Repeat]]:
    return {side: [pair[i] for pair in pairs] for i, side in enumerate(SIDES)}


def counted(warm_up: int, repeats: Sequence[Repeat], name: str) -> Array:
    """Returns a metric's values in all repeats of a side, step by step; times and speeds without the warm-up."""
    values: Array = np.concatenate([values_of(repeat, name, warm_up) for repeat in repeats])
    finite: Array = values[np.isfinite(values)]
    return finite


def mean_step_time(warm_up: int, sides: Sides) -> Figure | str:
    """Draws a bar per side, from zero, with the steps' 99th percentile if there are enough steps."""
    times = {side: counted(warm_up, repeats, STEP) for side, repeats in sides.items()}
    if not all(map(len, times.values())):
        return "not every side recorded the time of its steps"
    figure, axes = plain_figure(1.2 + 0.6 * len(times))
    for row, seconds in enumerate(times.values()):
        mean, words = float(seconds.mean()), f"{number(float(seconds.mean()))} s"
        axes.barh(row, mean, 0.5, color=COLOURS[row])
        if len(seconds) >= MIN_STEPS:
            p99 = float(np.percentile(seconds, 99))
            axes.plot([mean, p99], [row, row], color="#4D4D4D", linewidth=1.2, marker="|", markevery=[1])
            words += f", 99th percentile {number(p99)} s"
        axes.annotate(words, (0, row - 0.28), (2, 0), textcoords="offset points", va="bottom", fontsize=8)
    _rows(axes, list(times), "time of a step (s)")
    return figure


def peak_memory(warm_up: int, sides: Sides) -> Figure | str:
    """Draws the highest peaks of the trainer, in total and per part, for both sides."""
    peaks = {name: [counted(warm_up, repeats, name) for repeats in sides.values()] for name in PEAKS}
    shown = {
        name: [float(v.max()) for v in values] for name, values in peaks.items() if all(map(len, values))
    }
    if not shown:
        return "no peak of memory was recorded by both sides"
    bars = len(sides)
    figure, axes = plain_figure(1.2 + 0.25 * bars * len(shown))
    for i, side in enumerate(sides):
        rows = np.arange(len(shown)) + 0.76 / bars * (i - (bars - 1) / 2)
        values = [each[i] for each in shown.values()]
        axes.barh(rows, values, 0.72 / bars, color=COLOURS[i], label=side)
        for row, value in zip(rows, values, strict=True):
            words = f"{number(value)} GiB"
            axes.annotate(words, (value, row), (3, 0), textcoords="offset points", va="center", fontsize=7)
    _rows(axes, [metric_of(name).label for name in shown], "highest peak of a GPU's memory (GiB)")
    figure.legend(frameon=False, fontsize=8, loc="outside right center")
    return figure


def step_time(warm_up: int, sides: Sides) -> Figure | str:
    """Draws the time of each step after the warm-up, as the mean over the repeats."""
    return _lines(
        warm_up,
        sides,
        (STEP,),
        lambda axes, runs: draw_lines(axes, runs, ((STEP, "step"),), "time of a step (s)"),
    )


def raw_reward(warm_up: int, sides: Sides) -> Figure | str:
    """Draws the mean reward per rollout, and per evaluation of held-out prompts."""
    return _lines(warm_up, sides, (REWARD,), draw_reward)


def logprob_diff(warm_up: int, sides: Sides) -> Figure | str:
    return _lines(warm_up, sides, (LOGPROB_DIFF,), draw_logprob_diff)


def _lines(
    warm_up: int,
    sides: Sides,
    needed: Sequence[str],
    draw: Callable[[Axes, list[RunMetrics]], object],
) -> Figure | str:
    runs = [_mean_run(warm_up, side, repeats) for side, repeats in sides.items()]
    if missing := [run.name for run in runs if not run.series.keys() >= set(needed)]:
        return f"{' and '.join(needed)} was not recorded by {' and '.join(missing)}"
    figure, axes = plain_figure(3.6)
    draw(axes, runs)
    dress(axes, "")
    axes.xaxis.set_major_locator(MaxNLocator(nbins=8, steps=[1, 2, 5, 10], integer=True))
    name_runs(figure, runs)
    return figure


def _mean_run(warm_up: int, side: str, repeats: Sequence[Repeat]) -> RunMetrics:
    """Returns a side as one run, with the mean over its repeats for each metric. Times begin after the warm-up."""
    steps: dict[str, dict[int, list[float]]] = {}
    for repeat in repeats:
        for step, values in enumerate(repeat.steps):
            for name, value in values.items():
                if step >= warm_up or not name.endswith("_time"):
                    steps.setdefault(name, {}).setdefault(step, []).append(value)
        for rollouts, scores in repeat.evaluations.items():
            for name, value in scores.items():
                steps.setdefault(f"eval/{name}", {}).setdefault(int(rollouts), []).append(value)
    unit = UNITS["rollout/step"]
    series = {
        name: Series(np.array(sorted(of)), np.array([np.mean(of[step]) for step in sorted(of)]), unit)
        for name, of in steps.items()
    }
    return RunMetrics(side, series)


def _rows(axes: Axes, names: Sequence[str], xlabel: str) -> None:
    """Sets the axes for horizontal bars from zero, with one bar or one group of bars per name."""
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(names) - 0.5, -0.6)
    axes.set_xlim(0, 1.14 * axes.get_xlim()[1])
    axes.set_xlabel(xlabel)
    dress(axes, "")


def plain_figure(height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    return figure, figure.subplots()
