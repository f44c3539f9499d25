"""Numbers on their way to the trackers: accumulate over micro-batches, merge over ranks, reduce to floats.

Owns the step keys, the names this project adds to slime's metric names, and the check that a metric is a
number.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal, get_args

StepKey = Literal["rollout/step", "train/step", "eval/step"]
STEP_KEYS: tuple[str, ...] = get_args(StepKey)

LOGPROB_DIFF = "train/train_rollout_logprob_abs_diff"
LOGPROB_DIFF_MAX = "train/train_rollout_logprob_abs_diff_max"
"""Largest |trainer's - engine's log-prob| over the trained tokens of a step, nats. Not a slime name."""

Kind = Literal["mean", "sum", "max", "min"]


class MetricAccumulator:
    """Means, sums and extremes gathered piece by piece. Plain data: travels between processes by pickle.

    Deterministic: float64 additions in call order, so merging ranks in rank order gives the same bits each
    run. A NaN in any piece makes the result NaN, for extremes too.
    """

    def __init__(self) -> None:
        self._kinds: dict[str, Kind] = {}
        self._values: dict[str, float] = {}
        self._weights: dict[str, float] = {}

    def add_mean(self, name: str, total: float, count: float) -> None:
        """A piece of a weighted mean, total / count: `total` = (x * weight).sum(), `count` = weight.sum()."""
        self._add(name, "mean", total, count)

    def add_sum(self, name: str, value: float) -> None:
        self._add(name, "sum", value, 1.0)

    def add_max(self, name: str, value: float) -> None:
        self._add(name, "max", value, 1.0)

    def add_min(self, name: str, value: float) -> None:
        self._add(name, "min", value, 1.0)

    def merge(self, other: MetricAccumulator) -> None:
        """Take in the pieces of another accumulator (another rank or step)."""
        for name, kind in other._kinds.items():
            self._add(name, kind, other._values[name], other._weights[name])

    def reduce(self) -> dict[str, float]:
        """`{name: value}` in order of first use. A mean with count 0 has no value and is left out."""
        out = {}
        for name, kind in self._kinds.items():
            if kind != "mean":
                out[name] = self._values[name]
            elif self._weights[name] != 0:
                out[name] = self._values[name] / self._weights[name]
        return out

    def _add(self, name: str, kind: Kind, value: float, weight: float) -> None:
        value, weight = float(value), float(weight)
        known = self._kinds.setdefault(name, kind)
        if known != kind:
            raise ValueError(f"metric {name} must keep one kind, got {kind} after {known}; use another name")
        if name not in self._values:
            self._values[name], self._weights[name] = value, weight
            return
        old = self._values[name]
        if kind in ("mean", "sum"):
            self._values[name] = old + value
            self._weights[name] += weight
        elif math.isnan(old) or math.isnan(value):
            self._values[name] = math.nan
        else:
            self._values[name] = max(old, value) if kind == "max" else min(old, value)


def as_floats(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Every value as a Python float (NumPy scalars and one-element tensors too); ValueError names others."""
    out = {}
    for name, value in metrics.items():
        if not isinstance(name, str) or isinstance(value, str):
            raise ValueError(f"metric {name!r} must be a name with a number, got {value!r}; log numbers only")
        try:
            out[name] = float(value)
        except (TypeError, ValueError, RuntimeError) as error:
            raise ValueError(
                f"metric {name} must be one number, got {type(value).__name__}; reduce it before logging"
            ) from error
    return out
