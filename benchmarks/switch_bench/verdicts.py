"""Compares both sides metric by metric: values, difference and verdict. Defines names, units and wording."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from switch_bench.compare import Pair
from switch_bench.record import SIDES, Record, Repeat
from vime.view.measures import METRICS, PASS_TIME, SIZES, SPEED_OVER, SPEEDS, TIMES, WORDS, number
from vime.view.run_metrics import TIME_METRICS
from vime.view.statistics import MIN_PAIRS, Array, Difference, Summary, paired_difference, summarise

PASS_PARTS = ("perf/forward_time", "perf/policy_loss_time", "perf/backward_time")
PEAK = "_peak_gib"
TRAINER_PEAK = f"perf/trainer{PEAK}"
WHOLE_OF = dict.fromkeys((*PASS_PARTS, "rl_kernel/ratio_kl/ms", "rl_kernel/grpo_loss/ms"), PASS_TIME) | {
    part.replace("_time", PEAK): TRAINER_PEAK for part in PASS_PARTS
}
"""Part -> the metric that is compared instead, if it was recorded. The LM head's log-probs are in the forward on one
side and in the loss on the other side, so only the sum of forward, loss and backward is comparable."""
UNEQUAL = 0.001
"""Share of memory below which a difference is rounding by the allocator, and not a difference."""
STEP, TRAINING = "perf/step_time", "perf/actor_train_time"


@dataclass(frozen=True)
class Metric:
    """A metric. `better` is true if more is better, and None if neither direction is better."""

    name: str
    label: str
    unit: str
    better: bool | None


@dataclass(frozen=True)
class Comparison:
    """The comparison of a metric. `sides` has None for a side that did not record it. `difference` is None unless
    both sides recorded the metric, and for parts that are compared only in WHOLE_OF. `steps` is the number of steps
    per side."""

    metric: Metric
    sides: dict[str, Summary | None]
    difference: Difference | None
    steps: int

    @property
    def missing(self) -> list[str]:
        return [side for side, summary in self.sides.items() if summary is None]


def metric_of(name: str) -> Metric:
    if name in METRICS:
        return Metric(name, *METRICS[name])
    label = name.removeprefix("perf/").replace("_", " ")
    return Metric(name, label, "s", False)  # of TIME_METRICS


def values_of(repeat: Repeat, name: str, warm_up: int) -> Array:
    """Returns the values [S], NaN for steps without the metric. Times and speeds leave the warm-up out, numbers do not.

    For peak memory, it returns [1] with the largest value over all steps, because the peak decides about a failure.
    """
    if name.endswith(PEAK):
        return np.array([max((step[name] for step in repeat.steps if name in step), default=np.nan)])
    if name == PASS_TIME:
        first, *others = (values_of(repeat, part, warm_up) for part in PASS_PARTS)
        return sum(others, first)
    steps = repeat.steps[warm_up:] if metric_of(name).unit in (*TIMES, *SPEEDS) else repeat.steps
    return np.array([step.get(name, np.nan) for step in steps], dtype=np.float64)


def weights_of(repeat: Repeat, name: str, warm_up: int) -> Array:
    """Returns each step's share of the metric's mean [S], like `values_of`; NaN if it is unknown."""
    if name in SPEED_OVER:
        return values_of(repeat, SPEED_OVER[name], warm_up)
    return np.ones(len(values_of(repeat, name, warm_up)))


def compared(record: Record, pairs: Sequence[Pair]) -> list[Comparison]:
    """Compares every metric of METRICS, and then every part of a step that a side reported."""
    reported = {
        name for pair in pairs for repeat in pair for step in repeat.steps[record.warm_up :] for name in step
    }
    if all(part in reported for part in PASS_PARTS):
        reported.add(PASS_TIME)
    order = dict.fromkeys((*METRICS, *TIME_METRICS))
    found = [_compare(record, pairs, name) for name in order if name in reported]
    # Leave out a metric that every side lacks: for example, a sum with parts that no side reported completely.
    found = [c for c in found if len(c.missing) < len(SIDES)]
    wholes = {c.metric.name for c in found} & set(WHOLE_OF.values())
    return [replace(c, difference=None) if WHOLE_OF.get(c.metric.name) in wholes else c for c in found]


def _compare(record: Record, pairs: Sequence[Pair], name: str) -> Comparison:
    metric = metric_of(name)
    values, weights = (
        [(of(a, name, record.warm_up), of(b, name, record.warm_up)) for a, b in pairs]
        for of in (values_of, weights_of)
    )
    flat = np.concatenate([side for pair in values for side in pair])
    relative = metric.unit in WORDS and bool((flat[np.isfinite(flat)] > 0).all())
    sides = {
        side: summarise([pair[i] for pair in values], [pair[i] for pair in weights], geometric=relative)
        for i, side in enumerate(SIDES)
    }
    difference = paired_difference(values, weights, relative=relative) if all(sides.values()) else None
    if difference is not None and (not relative or metric.unit in SIZES) and _copies(difference):
        difference = replace(difference, low=None, high=None)
    return Comparison(metric, sides, difference, len(flat) // 2)


def _copies(difference: Difference) -> bool:
    """Returns whether all pairs have the same difference, as runs with the same seed do. They are one sample."""
    return len(difference.pairs) > 1 and len(set(difference.pairs)) == 1 and difference.value != 0


def verdict(metric: Metric, difference: Difference) -> tuple[str, bool]:
    """Returns (the interval's meaning in words, whether it shows a difference)."""
    direction = WORDS.get(metric.unit, ("lower", "higher"))[difference.value > 0]
    if _is_rounding(metric, difference):
        return f"same within {100 * UNEQUAL:.1f} %", False
    if difference.low is None and _copies(difference):
        if metric.unit in SIZES and difference.relative:  # equal batches take equal memory
            return f"{direction}, by as much in every repeat", True
        return "the same in every repeat: one sample, no verdict", False
    if difference.within is None:
        return f"fewer than {MIN_PAIRS} pairs, no verdict", False
    if difference.within == 0:
        return "equal", False
    if not difference.shown:
        return f"no difference shown (within {amount(metric, difference, difference.within)})", False
    return "differs" if metric.better is None else direction, True


def _is_rounding(metric: Metric, difference: Difference) -> bool:
    """Returns whether memory differs by less than UNEQUAL, by the interval or equally in every repeat, but not by 0."""
    if metric.unit not in SIZES or not difference.relative:
        return False
    within = abs(difference.value) if _copies(difference) else difference.within
    return within is not None and 0 < within < UNEQUAL


def amount(metric: Metric, difference: Difference, value: float, sign: str = "") -> str:
    """Returns a relative value in percent, and any other value in its unit. `sign` is "+" or ""."""
    text = bare(difference, value, sign)
    return f"{text} %" if difference.relative else with_unit(text, metric)


def bare(difference: Difference, value: float, sign: str = "") -> str:
    """Returns `amount` without its unit."""
    if not difference.relative or value == 0:
        return number(value, sign)
    percent = 100 * value
    return f"{percent:{sign},.{1 if abs(percent) >= 1 else 2}f}"


def with_unit(text: str, metric: Metric) -> str:
    return f"{text} {metric.unit}" if metric.unit else text
