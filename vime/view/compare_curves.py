"""Compares the curves of two sides in tables: each metric over quarters of the run, with the difference between the
sides.

Legend: P pairs of runs, S steps that a run has logged.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np

from slime.tracking.metrics import is_score
from vime.view.compare_runs import ComparedRun
from vime.view.measures import METRICS, SPEED_OVER, WORDS, number
from vime.view.run_metrics import UNITS
from vime.view.statistics import Array, Difference, Sides, Summary, paired_difference, summarise

Pairs = Sequence[tuple[ComparedRun, ComparedRun]]
WINDOWS = 4
NAMES = (
    *("rollout/raw_reward", "train/loss", "rollout/response_len/mean", "train/ppo_kl", "train/kl_loss"),
    *("train/train_rollout_logprob_abs_diff", "train/grad_norm", "rollout/staleness/token_mean"),
    *("perf/step_time", "perf/rollout_time", "perf/actor_train_time", "perf/step_tokens_per_sec"),
    "perf/trainer_peak_gib",
)
LABELS = {"rollout/staleness/token_mean": ("staleness of tokens", "updates")}


def curve_lines(pairs: Pairs) -> Iterator[str]:
    """Yields a table for each metric that both sides have."""
    for name in NAMES:
        if any(name in run.series for pair in pairs for run in pair):
            yield from ("", *_metric(pairs, name))


def _metric(pairs: Pairs, name: str) -> Iterator[str]:
    label, unit, *_ = METRICS.get(name) or LABELS[name]
    title = f"### {label}{f' ({unit})' if unit else ''}: `{name}`"
    both = [pair for pair in pairs if all(name in run.series for run in pair)]
    if not both:
        yield from (title, "", "One side did not record it.")
        return
    last = min(int(run.series[name].steps.max()) for pair in both for run in pair)
    first = max(int(run.series[name].steps.min()) for pair in both for run in pair)
    yield from (title, "")
    if last < first:
        yield "The sides have no step in common."
        return
    steps = UNITS_SHOWN[both[0][0].series[name].unit]
    yield from (f"| {steps} | A | B | B - A |", "| ---: | ---: | ---: | ---: |")
    for begin, end in [*_quarters(first, last), (first, last)]:
        yield _row(both, name, unit, begin, end)


UNITS_SHOWN = {unit: f"{unit}s" for unit in UNITS.values()}


def _quarters(first: int, last: int) -> list[tuple[int, int]]:
    """Returns each quarter's first and last step. The list is empty for a run that is too short."""
    count = last - first + 1
    if count < 2 * WINDOWS:
        return []
    edges = [first + count * i // WINDOWS for i in range(WINDOWS + 1)]
    return [(begin, end - 1) for begin, end in pairwise(edges)]


def _row(pairs: Pairs, name: str, unit: str, begin: int, end: int) -> str:
    over = SPEED_OVER.get(name)

    logged = np.concatenate([run.series[name].steps for pair in pairs for run in pair])
    steps = np.unique(logged[(logged >= begin) & (logged <= end)])

    def step_weights(run: ComparedRun) -> Array:
        return np.ones(len(steps)) if over is None else _values(run, over, steps)

    values: list[Sides] = [(_values(a, name, steps), _values(b, name, steps)) for a, b in pairs]
    weights: list[Sides] = [(step_weights(a), step_weights(b)) for a, b in pairs]
    flat = np.concatenate([side for pair in values for side in pair])
    relative = unit in WORDS and bool((flat[np.isfinite(flat)] > 0).all())
    difference = paired_difference(values, weights, relative=relative)
    sides = [
        summarise([pair[i] for pair in values], [pair[i] for pair in weights], geometric=relative)
        for i in (0, 1)
    ]
    return (
        f"| {begin} to {end} | {' | '.join(map(_format_summary, sides))} | {format_difference(difference)} |"
    )


def _values(run: ComparedRun, name: str, steps: np.ndarray) -> Array:
    """Returns the metric's values at these steps, [S], with NaN where the run did not log the metric. `steps`
    ascend."""
    found = np.full(len(steps), np.nan)
    if (series := run.series.get(name)) is not None:
        inside = np.isin(series.steps, steps)
        found[np.searchsorted(steps, series.steps[inside])] = series.values[inside]
    return found


def _format_summary(summary: Summary | None) -> str:
    """Formats the mean and the standard deviation over a side's runs."""
    if summary is None:
        return "-"
    spread = "" if summary.spread is None else f" ± {number(summary.spread)}"
    return f"{number(summary.mean)}{spread}"


def format_difference(difference: Difference | None) -> str:
    """Formats a difference with its interval, in bold if the interval excludes 0."""
    if difference is None:
        return "-"
    unit, scale = (" %", 100.0) if difference.relative else ("", 1.0)

    def signed(value: float) -> str:
        return ("+" if value > 0 else "") + number(scale * value)

    text = f"{signed(difference.value)}{unit}"
    if difference.low is None or difference.high is None:
        return text
    text += f" [{signed(difference.low)}, {signed(difference.high)}]"
    return f"**{text}**" if difference.shown else text


def score_lines(pairs: Pairs) -> Iterator[str]:
    """Yields a table for each evaluation set: the score each time that both sides evaluated."""
    names = sorted(
        {name for pair in pairs for run in pair for name in run.series if is_score(name, run.series)}
    )
    for name in names:
        both = [pair for pair in pairs if all(name in run.series for run in pair)]
        yield from ("", f"### score: `{name}`", "")
        if not both:
            yield "One side did not record it."
            continue
        moments = set.intersection(*(set(map(int, run.series[name].steps)) for pair in both for run in pair))
        yield from ("| rollouts trained on | A | B | B - A |", "| ---: | ---: | ---: | ---: |")
        for moment in sorted(moments):
            yield _row(both, name, "", moment, moment).replace(
                f"| {moment} to {moment} |", f"| {moment} |", 1
            )
