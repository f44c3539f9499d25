"""Computes summaries and paired intervals for the difference between two sides, from repeated runs. Needs numpy only.

Runs alternate between the sides (A B A B), so repeat i of one side pairs with repeat i of the other side. Slow changes
(clocks, heat, other work) then affect both runs of a pair. The repeats are independent. The steps within a run are not
independent, because they share the run's start, its machine and the samples that its policy drew. An interval over
steps would find a difference between any two runs.

Legend: P pairs of repeats, S steps of a repeat after warm-up. A value that a step did not report is NaN, never 0. A
step's weight is its share in the mean. The weights of a speed are times, so the mean speed is the total tokens divided
by the total seconds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Array: TypeAlias = npt.NDArray[np.float64]
Sides: TypeAlias = tuple[Array, Array]
LEVEL = 0.95
MIN_PAIRS = 3
"""Minimum number of pairs for an interval. Fewer pairs do not show how much the runs of one side differ."""


@dataclass(frozen=True)
class Summary:
    """The summary of one metric of a side. `repeats` has the mean per repeat. `spread` is the standard deviation of
    these means, or None for a single repeat. If `geometric` is true, the mean over the repeats is geometric, as in the
    relative difference of two sides."""

    steps: int
    repeats: tuple[float, ...]
    spread: float | None
    geometric: bool

    @property
    def mean(self) -> float:
        """Returns the mean over the repeats, with equal weights."""
        return float(np.exp(np.mean(np.log(self.repeats))) if self.geometric else np.mean(self.repeats))


@dataclass(frozen=True)
class Difference:
    """The difference "second side minus first side". If `relative` is true, the values are shares of the first side
    (0.03 is 3 % more), else they are in the metric's unit.

    `pairs` has one value per pair. `low` and `high` are the interval at LEVEL, or None with too few pairs.
    """

    relative: bool
    value: float
    pairs: tuple[float, ...]
    low: float | None
    high: float | None

    @property
    def within(self) -> float | None:
        """Returns the largest absolute difference in the interval, or None without an interval."""
        return None if self.low is None or self.high is None else max(abs(self.low), abs(self.high))

    @property
    def shown(self) -> bool:
        return self.low is not None and self.high is not None and (self.low > 0 or self.high < 0)


def summarise(repeats: Sequence[Array], weights: Sequence[Array], *, geometric: bool) -> Summary | None:
    """Returns the summary of the repeats' values [S], or None if no value is a finite number."""
    known = [np.isfinite(values) & np.isfinite(w) for values, w in zip(repeats, weights, strict=True)]
    usable = [(values[k], w[k]) for values, w, k in zip(repeats, weights, known, strict=True) if k.any()]
    if not usable:
        return None
    means = np.array([np.average(values, weights=w) for values, w in usable])
    spread = float(means.std(ddof=1)) if len(means) > 1 else None
    return Summary(sum(len(values) for values, _ in usable), tuple(map(float, means)), spread, geometric)


def paired_difference(
    pairs: Sequence[Sides], weights: Sequence[Sides], *, relative: bool
) -> Difference | None:
    """Returns the difference of P pairs of values [S], or None if no pair has a step that both sides reported.

    Step k pairs with step k, and a step that one side did not report is left out on both sides. The interval is
    Student's over the P differences with P - 1 degrees of freedom, so it holds for further pairs of runs. Fewer than
    MIN_PAIRS pairs have no interval, unless every step is equal on both sides. With `relative`, each difference is the
    log of the ratio of two means, and all values must be positive.
    """
    found = [_reported_by_both(pair, pair_weights) for pair, pair_weights in zip(pairs, weights, strict=True)]
    usable = [both for both in found if len(both[0][0])]
    if not usable:
        return None
    means = np.array([[np.average(values, weights=w) for values, w in both] for both in usable])  # [P, 2]
    each = np.log(means[:, 1] / means[:, 0]) if relative else means[:, 1] - means[:, 0]
    value, half = float(each.mean()), None
    if len(usable) >= MIN_PAIRS:
        half = student_quantile(len(each) - 1) * float(each.std(ddof=1)) / math.sqrt(len(each))
    elif all(np.array_equal(first[0], second[0]) for first, second in usable):
        half = 0.0  # equal values have no spread to estimate

    def from_log(x: float) -> float:
        return math.expm1(x) if relative else x

    return Difference(
        relative=relative,
        value=from_log(value),
        pairs=tuple(from_log(float(x)) for x in each),
        low=None if half is None else from_log(value - half),
        high=None if half is None else from_log(value + half),
    )


def _reported_by_both(pair: Sides, weights: Sides) -> tuple[Sides, Sides]:
    """Returns (values, weights) [S] of each side, for the steps that both sides reported."""
    steps = min(map(len, pair))
    cut = [(values[:steps], w[:steps]) for values, w in zip(pair, weights, strict=True)]
    both = np.logical_and.reduce([np.isfinite(values) & np.isfinite(w) for values, w in cut])
    first, second = ((values[both], w[both]) for values, w in cut)
    return first, second


@cache
def student_quantile(freedom: int) -> float:
    """Returns t with P(|T| <= t) = LEVEL for `freedom` degrees of freedom.

    With t = sqrt(f) tan(a), the density is cos(a)^(f - 1) up to a constant. The function integrates the density over a
    in [0, pi/2) by the trapezoid rule, scales the integral to 1, and inverts the integral by interpolation. The
    relative error is below 1e-4 for `freedom` >= 1 at 0.95.
    """
    angle = np.linspace(0.0, math.pi / 2, 100_001)
    density = np.cos(angle) ** (freedom - 1)
    area = np.concatenate([[0.0], np.cumsum((density[1:] + density[:-1]) / 2)])
    return math.sqrt(freedom) * math.tan(float(np.interp(LEVEL, area / area[-1], angle)))
