"""Metric by metric: what both sides recorded, the difference, and the words for it. Owns names, units and wording."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from vime.bench.compare import KERNEL_SWITCHES, Pair, kernels_ran
from vime.bench.record import METRICS, SIDES, Record, Repeat
from vime.bench.statistics import MIN_PAIRS, Difference, Summary, paired_difference, summarise
from vime.run_metrics import TIME_METRICS

PASS_TIME = "perf/pass_time"
PASS_PARTS = ("perf/forward_time", "perf/policy_loss_time", "perf/backward_time")
"""The head's log-probs are in the forward of one path and in the loss of the other: only their sum is like and like."""
PEAK = "_peak_gib"
TRAINER_PEAK = f"perf/trainer{PEAK}"
PASS_OPERATORS = ("rl_kernel/ratio_kl/ms", "rl_kernel/grpo_loss/ms")
"""Of the baseline's PyTorch these are the calls, of kernels the backward too: not like and like either."""
WHOLE_OF = dict.fromkeys((*PASS_PARTS, *PASS_OPERATORS), PASS_TIME) | {
    part.replace("_time", PEAK): TRAINER_PEAK for part in PASS_PARTS
}
"""What has no difference of its own where the metric is there that it is a part of."""
DERIVED = {PASS_TIME: ("forward + loss + backward", "s", False)}

SPEED_OVER = {
    "perf/step_tokens_per_sec": "perf/step_time",
    "perf/step_tokens_per_gpu_per_sec": "perf/step_time",
    "perf/tokens_per_gpu_per_sec": "perf/rollout_time",
    "perf/actor_train_tok_per_s": "perf/actor_train_time",
}
"""A speed -> the time it was measured over. Its mean is all tokens by all seconds: a step weighs as its time does."""

SMALL = 0.01
UNEQUAL = 0.001
"""The share of memory below which a difference, however certain, is an allocator's rounding: neither less nor more."""
STEP, WAIT, TRAINING = "perf/step_time", "perf/train_wait_time", "perf/actor_train_time"
LOG_PROBS = ("perf/log_probs_time", "perf/ref_log_probs_time")
HOLD_KERNELS = (*LOG_PROBS, *PASS_PARTS, *PASS_OPERATORS, PASS_TIME, TRAINING, "perf/actor_train_tok_per_s")
"""Times and speeds that hold switched kernels; what moves the others, of engines and hand-overs, is something else."""
ABOUT = {"module": TRAINING, "e2e": STEP}
"""The time that a tier is about. Of a module the step waits for a file and hands weights to nobody."""
NOT_CREDITED = {True: "more, cause not shown", False: "less, cause not shown"}
"""Of a time or speed that the kernels are not credited with, by whether it is more on their side."""
TIMES, SPEEDS, SIZES = ("s", "ms"), ("tokens/s",), ("GiB",)


@dataclass(frozen=True)
class Metric:
    name: str
    label: str
    unit: str
    better: bool | None  # whether more is better; None where neither is


@dataclass(frozen=True)
class Comparison:
    """One metric. `sides`: None for one that did not record it. `difference`: None unless both did, and for what
    compares as a part of WHOLE_OF alone."""

    metric: Metric
    sides: dict[str, Summary | None]
    difference: Difference | None
    steps: int  # that either side could have reported
    small: bool = False  # a part of a step that METRICS does not name, and under SMALL of it on both sides

    @property
    def missing(self) -> list[str]:
        return [side for side, summary in self.sides.items() if summary is None]


def metric_of(name: str) -> Metric:
    known = {**METRICS, **DERIVED}
    if name in known:
        return Metric(name, *known[name])
    label = name.removeprefix("perf/").replace("_", " ")
    return Metric(name, label, "s", False)  # of TIME_METRICS


def values_of(repeat: Repeat, name: str, warm_up: int) -> np.ndarray:
    """[S], NaN where a step did not report it; derived metrics where all parts did. Times and speeds are of the steps
    after the warm-up, which is one of clocks, caches and compilers: numbers are of all steps.

    Of peak memory [1], the largest of all steps: what runs out of memory is not the mean.
    """
    if name.endswith(PEAK):
        return np.array([max((step[name] for step in repeat.steps if name in step), default=np.nan)])
    steps = repeat.steps[warm_up:] if is_timed(name) else repeat.steps
    if name == PASS_TIME:
        return np.sum([values_of(repeat, part, warm_up) for part in PASS_PARTS], axis=0)
    return np.array([step.get(name, np.nan) for step in steps], dtype=np.float64)


def is_timed(name: str) -> bool:
    """Whether a warm-up is no part of the metric."""
    return metric_of(name).unit in (*TIMES, *SPEEDS)


def weights_of(repeat: Repeat, name: str, warm_up: int) -> np.ndarray:
    """[S], like `values_of`: what share of the metric's mean a step is; NaN where that is not known."""
    values = values_of(repeat, name, warm_up)
    return values_of(repeat, SPEED_OVER[name], warm_up) if name in SPEED_OVER else np.ones(len(values))


def compared(record: Record, pairs: Sequence[Pair]) -> list[Comparison]:
    """Every metric that a step of either side reported: those of METRICS in its order, then the others by name.

    Of runs only METRICS and the parts of a step count: the rest of what a run logs is no measurement.
    """
    reported = {
        name for pair in pairs for repeat in pair for step in repeat.steps[record.warm_up :] for name in step
    }
    if all(part in reported for part in PASS_PARTS):
        reported.add(PASS_TIME)
    order = list(METRICS)
    after = order.index(PASS_PARTS[-1]) + 1
    order = [*order[:after], *DERIVED, *order[after:], *TIME_METRICS]
    names = [name for name in dict.fromkeys(order) if name in reported]
    found = [_compare(record, pairs, name) for name in names]
    found = [
        c for c in found if len(c.missing) < len(SIDES)
    ]  # a sum of parts of which each side lacks another one
    together = {c.metric.name for c in found} & set(WHOLE_OF.values())
    found = [replace(c, difference=None) if WHOLE_OF.get(c.metric.name) in together else c for c in found]
    if record.switch["field"] in KERNEL_SWITCHES:
        found = _without_credit(found, HOLD_KERNELS if kernels_ran(record, pairs) else ())
    if ABOUT[record.tier] != STEP:
        found = [_renamed(c, "step on saved rollouts") if c.metric.name == STEP else c for c in found]
    step = next((c for c in found if c.metric.name == STEP), None)
    return [replace(c, small=step is not None and _is_small(c, step)) for c in found]


def _renamed(c: Comparison, label: str) -> Comparison:
    return replace(c, metric=replace(c.metric, label=label))


def _without_credit(found: Sequence[Comparison], credited: Sequence[str]) -> list[Comparison]:
    """Of times and speeds that are not `credited`, so of rollouts and of whole steps, neither direction is the better
    one: they are more or less, whatever moved them."""

    def judged(metric: Metric) -> Metric:
        timed = metric.unit in (*TIMES, *SPEEDS)
        return replace(metric, better=None) if timed and metric.name not in credited else metric

    return [replace(c, metric=judged(c.metric)) for c in found]


def parts_of_step(found: Sequence[Comparison]) -> dict[str, float] | None:
    """Seconds that a step, the wait for its rollout and its passes of the trainer take more on the side of the kernels,
    by metric. None where steps are not shown to differ, or a side did not record their wait or training."""
    by_name = {c.metric.name: c for c in found if not c.missing and c.difference is not None}
    if any(name not in by_name for name in (STEP, WAIT, TRAINING)):
        return None
    step = by_name[STEP]
    if step.difference is None or not is_shown(step.metric, step.difference):
        return None
    return {name: _more(by_name[name]) for name in (STEP, WAIT, *LOG_PROBS, TRAINING) if name in by_name}


def _more(c: Comparison) -> float:
    """Of plain means: those of the tables are geometric, whose parts do not add up."""
    baseline, rl_kernel = (np.mean(side.repeats) for side in c.sides.values() if side is not None)
    return float(rl_kernel - baseline)


def _is_small(c: Comparison, step: Comparison) -> bool:
    if c.metric.name in METRICS or c.metric.name not in TIME_METRICS or c.missing:
        return False
    pairs = [(c.sides[side], step.sides[side]) for side in SIDES]
    return all(
        part is not None and whole is not None and part.mean < SMALL * whole.mean for part, whole in pairs
    )


def _compare(record: Record, pairs: Sequence[Pair], name: str) -> Comparison:
    metric = metric_of(name)
    values, weights = (
        [(of(a, name, record.warm_up), of(b, name, record.warm_up)) for a, b in pairs]
        for of in (values_of, weights_of)
    )
    flat = np.concatenate([side for pair in values for side in pair])
    relative = metric.unit in (*TIMES, *SPEEDS, *SIZES) and bool((flat[np.isfinite(flat)] > 0).all())
    sides = {
        side: summarise([pair[i] for pair in values], [pair[i] for pair in weights], geometric=relative)
        for i, side in enumerate(SIDES)
    }
    difference = paired_difference(values, weights, relative=relative) if all(sides.values()) else None
    if difference is not None and (not relative or metric.unit in SIZES) and _copies(difference):
        difference = replace(difference, low=None, high=None)
    return Comparison(metric, sides, difference, len(flat) // 2)


def _copies(difference: Difference) -> bool:
    """Whether pairs that differ all differ alike, as runs of one seed do: a sample of one, without an interval."""
    return len(difference.pairs) > 1 and len(set(difference.pairs)) == 1 and difference.value != 0


def verdict(metric: Metric, difference: Difference) -> str:
    """In words what the interval allows to say, no more."""
    if _is_rounding(metric, difference):
        return f"same within {100 * UNEQUAL:.1f} %"
    if difference.low is None and _copies(difference):
        if metric.unit in SIZES and difference.relative:  # equal batches take equal memory
            return f"{_direction(metric, difference.value > 0)}, by as much in every repeat"
        return "the same in every repeat: one sample, no verdict"
    if difference.low is None or difference.high is None or difference.within is None:
        return f"fewer than {MIN_PAIRS} pairs, no verdict"
    bound = amount(metric, difference, difference.within)
    if difference.within == 0:
        return "equal"
    if not difference.shown:
        return f"no difference shown (within {bound})"
    if metric.better is not None:
        return _direction(metric, difference.value > 0)
    return NOT_CREDITED[difference.value > 0] if metric.unit in (*TIMES, *SPEEDS) else "differs"


def is_shown(metric: Metric, difference: Difference) -> bool:
    """Whether the verdict is that the sides differ."""
    alike = metric.unit in SIZES and difference.relative and difference.low is None and _copies(difference)
    return (difference.shown or alike) and not _is_rounding(metric, difference)


def _is_rounding(metric: Metric, difference: Difference) -> bool:
    """Memory that differs by less than UNEQUAL, by the interval or alike in every repeat; not what is equal."""
    if metric.unit not in SIZES or not difference.relative:
        return False
    within = abs(difference.value) if _copies(difference) else difference.within
    return within is not None and 0 < within < UNEQUAL


def _direction(metric: Metric, more: bool) -> str:
    if metric.unit in TIMES:
        return "slower" if more else "faster"
    if metric.unit in SPEEDS:
        return "faster" if more else "slower"
    if metric.unit in SIZES:
        return "more memory" if more else "less memory"
    return "higher" if more else "lower"


def amount(metric: Metric, difference: Difference, value: float, sign: str = "") -> str:
    """A difference as a reader wants it: a share in percent, anything else in its unit. `sign`: "+" or ""."""
    text = bare(difference, value, sign)
    return f"{text} %" if difference.relative else with_unit(text, metric)


def bare(difference: Difference, value: float, sign: str = "") -> str:
    """`amount` without its unit."""
    if not difference.relative or value == 0:
        return number(value, sign)
    percent = 100 * value
    return f"{percent:{sign},.{1 if abs(percent) >= 1 else 2}f}"


def number(value: float, sign: str = "", *, digits: int = 4) -> str:
    """So many significant digits: 12,345; 12.35; 0.1235; 1.23e-05. Integers keep all of theirs."""
    if value == 0:
        return "0"
    if abs(value) >= 10 ** (digits - 1):
        return f"{value:{sign},.0f}"
    return f"{value:{sign}.{min(digits, 3) - 1}e}" if abs(value) < 1e-3 else f"{value:{sign}.{digits}g}"


def with_unit(text: str, metric: Metric) -> str:
    return f"{text} {metric.unit}" if metric.unit else text
