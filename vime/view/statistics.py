"""What repeats of two sides say about a difference: summaries and paired intervals. numpy only; owns no files.

Runs go A B A B, so repeat i of a side pairs with repeat i of the other: what drifts over hours (clocks, heat, other
work) is in both. The repeats are independent, the steps within a run are not: they share its start, its machine and the
samples its policy drew. An interval over steps would call any two runs different.

Legend: P pairs of repeats, S steps of a repeat after warm-up. A value that a step did not report is NaN, never 0.
Weights are how much of a mean a step is: a speed's are times, so that its mean is all tokens divided by all seconds.
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
"""Pairs from which on there is an interval: how much two runs of a side differ is not known from fewer."""


@dataclass(frozen=True)
class Summary:
    """One metric of a side. `repeats`: the mean per repeat; `spread`: their standard deviation, None for one.

    `geometric`: repeats are averaged geometrically, as the relative difference of two sides is.
    """

    steps: int
    repeats: tuple[float, ...]
    spread: float | None
    geometric: bool

    @property
    def mean(self) -> float:
        """Every repeat weighs the same."""
        return float(np.exp(np.mean(np.log(self.repeats))) if self.geometric else np.mean(self.repeats))


@dataclass(frozen=True)
class Difference:
    """Second side minus the first. `relative`: as a share of the first (0.03 is 3 % more), else in the metric's unit.

    `pairs`: one value per pair. `low`, `high`: the interval at LEVEL, None where there is too little for one.
    """

    relative: bool
    value: float
    pairs: tuple[float, ...]
    low: float | None
    high: float | None

    @property
    def within(self) -> float | None:
        """The largest difference, either way, that the interval allows."""
        return None if self.low is None or self.high is None else max(abs(self.low), abs(self.high))

    @property
    def shown(self) -> bool:
        return self.low is not None and self.high is not None and (self.low > 0 or self.high < 0)


def summarise(repeats: Sequence[Array], weights: Sequence[Array], *, geometric: bool) -> Summary | None:
    """Of each repeat's values [S]; None when no value is a number."""
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
    """The difference of P pairs of [S] values; None when no step of a pair was reported by both sides.

    Step k pairs with step k; one that a side did not report is left out twice. The interval is Student's over the P
    differences, P - 1 degrees of freedom: it holds for another pair of runs. Of fewer than MIN_PAIRS there is none,
    unless every step is equal. With `relative`, differences are logs of the ratio of means of positive values.
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
        half = 0.0  # nothing to estimate

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
    """Of each side (values, weights), [S] for the steps that both have."""
    steps = min(map(len, pair))
    cut = [(values[:steps], w[:steps]) for values, w in zip(pair, weights, strict=True)]
    both = np.logical_and.reduce([np.isfinite(values) & np.isfinite(w) for values, w in cut])
    first, second = ((values[both], w[both]) for values, w in cut)
    return first, second


@cache
def student_quantile(freedom: int) -> float:
    """t with P(|T| <= t) = LEVEL for `freedom` degrees of freedom.

    With t = sqrt(f) tan(a) the density is cos(a)^(f - 1) up to a constant: its integral over a in [0, pi/2), by the
    trapezoid rule, is scaled to 1 and read backwards. Relative error below 1e-4 for `freedom` >= 1 at 0.95.
    """
    angle = np.linspace(0.0, math.pi / 2, 100_001)
    density = np.cos(angle) ** (freedom - 1)
    area = np.concatenate([[0.0], np.cumsum((density[1:] + density[:-1]) / 2)])
    return math.sqrt(freedom) * math.tan(float(np.interp(LEVEL, area / area[-1], angle)))
