"""The tables of a benchmark report, each as lines of Markdown. Owns which metrics stand together, and no number."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from vime.bench.compare import KERNEL_SWITCHES, Pair, cautions, kernels_ran
from vime.bench.record import BASELINE, METRICS, RL_KERNEL, SIDES, Record
from vime.bench.statistics import LEVEL, PERCENTILES, Difference, Summary
from vime.bench.verdicts import (
    ABOUT,
    HOLD_KERNELS,
    SIZES,
    SMALL,
    SPEEDS,
    STEP,
    TIMES,
    TRAINER_PEAK,
    TRAINING,
    WHOLE_OF,
    Comparison,
    amount,
    bare,
    is_shown,
    metric_of,
    number,
    parts_of_step,
    verdict,
    with_unit,
)

INTERVAL = f"{100 * LEVEL:.0f} % interval"
HEADLINES = (
    TRAINER_PEAK,
    TRAINING,
    STEP,
    "rollout/raw_reward",
    "train/train_rollout_logprob_abs_diff",
)
IN_A_ROW = (TRAINER_PEAK, TRAINING, STEP)
HEAD_NOTE = (
    "The LM head's log-probs may be in the forward of one path and in the loss of the other: forward, loss and "
    "backward have a difference together, and none alone; of memory see the trainer's peak. Ratio, KL and clipped loss "
    "alone are calls of those operators, with their backward where a kernel runs."
)
MOST_PAIRS = 6
"""Pairs that a row lists; of more it says the least and the largest difference."""


def in_short(record: Record, found: Sequence[Comparison]) -> Iterator[str]:
    """The metrics that a benchmark of runs is made for, a line each."""
    if texts := headlines(record, found):
        yield ""
    yield from (f"- {text}" for text in texts)


def headlines(record: Record, found: Sequence[Comparison]) -> list[str]:
    """Of HEADLINES that both sides recorded: means, difference, interval where there is one, verdict."""
    texts = []
    for c, d in _picked(record, found, HEADLINES):
        interval = f" ({INTERVAL}: {_interval(c, d)})" if d.low is not None else ""
        value = amount(c.metric, d, d.value, "+")
        texts.append(f"**{c.metric.label}** {_means(c)}, {value}{interval}: {verdict(c.metric, d)}")
    return texts


def cells_of(record: Record, found: Sequence[Comparison]) -> list[str]:
    """A cell for each of IN_A_ROW: means, difference, interval; empty where there is no comparison."""
    cells = dict.fromkeys(IN_A_ROW, "")
    for c, d in _picked(record, found, IN_A_ROW):
        interval = f" ({_interval(c, d)})" if d.low is not None else ""
        cells[c.metric.name] = f"{_means(c)}, {bold(amount(c.metric, d, d.value, '+'), c, d)}{interval}"
    return list(cells.values())


def _picked(
    record: Record, found: Sequence[Comparison], names: Sequence[str]
) -> Iterator[tuple[Comparison, Difference]]:
    """Those of `names` that are compared, in that order. A step is none of a tier that is not about it."""
    by_name = {c.metric.name: c for c in found if c.metric.name != STEP or ABOUT[record.tier] == STEP}
    for c in (by_name[name] for name in names if name in by_name):
        if c.difference is not None:
            yield c, c.difference


def _means(c: Comparison) -> str:
    baseline, rl_kernel = (number(side.mean, digits=3) for side in c.sides.values() if side is not None)
    return f"{baseline} to {with_unit(rl_kernel, c.metric)}"


def bold(text: str, c: Comparison, d: Difference) -> str:
    return f"**{text}**" if is_shown(c.metric, d) else text


def minds(record: Record, pairs: Sequence[Pair], found: Sequence[Comparison]) -> Iterator[str]:
    """What has to be known to read a comparison, a line each."""
    yield from (f"- **Mind** {text}" for text in cautions(record, pairs))
    if (
        ABOUT[record.tier] != STEP
        or record.switch["field"] not in KERNEL_SWITCHES
        or not kernels_ran(record, pairs)
    ):
        return
    if (parts := parts_of_step(found)) is not None:
        step, *texts = (
            f"{metric_of(name).label} {abs(seconds):.2f} s {'longer' if seconds > 0 else 'shorter'}"
            for name, seconds in parts.items()
        )
        *others, last = (metric_of(name).label for name in parts if name in HOLD_KERNELS)
        passes = f"{', '.join(others)} and {last}" if others else last
        yield (
            f"- **Mind** By plain means: {step}; in it {', '.join(texts)}. Operators run in {passes}: only that is "
            "called faster or slower; what else moved the step is not known."
        )


def verdicts(found: Sequence[Comparison]) -> Iterator[str]:
    """A table a group of metrics; then what one side or both did not record."""
    both = [c for c in found if not c.missing and not c.small]
    for title, members in _groups(both).items():
        if members:
            yield from ("", f"#### {title}", "")
            yield from _table(members)
            if title == "Time":
                yield from ("", HEAD_NOTE)
                if small := [c.metric.label for c in found if c.small]:
                    yield from (
                        "",
                        f"Under {100 * SMALL:.0f} % of a step on both sides, not listed: {', '.join(small)}.",
                    )
    single = [c for c in found if c.missing]
    if single:
        yield from ("", "#### Recorded by one side only: nothing to compare", "")
    for c in single:
        ((side, summary),) = ((side, summary) for side, summary in c.sides.items() if summary is not None)
        yield f"- {_label(c)}: {side} {_value(c, summary)}; {c.missing[0]} did not record it"
    recorded = {c.metric.name for c in found}
    absent = [metric_of(name).label for name in METRICS if name not in recorded]
    if absent:
        yield from ("", f"Recorded by neither side: {'; '.join(absent)}.")


def _groups(both: Sequence[Comparison]) -> dict[str, list[Comparison]]:
    groups: dict[str, list[Comparison]] = {
        name: [] for name in ("Time", "Throughput", "Peak memory", "Learning and agreement")
    }
    for c in both:
        kinds = (("Time", TIMES), ("Throughput", SPEEDS), ("Peak memory", SIZES))
        name = next((name for name, units in kinds if c.metric.unit in units), "Learning and agreement")
        groups[name].append(c)
    return groups


def _table(members: Sequence[Comparison]) -> Iterator[str]:
    yield f"| metric | {BASELINE} | {RL_KERNEL} | difference | {INTERVAL} | of each pair | verdict |"
    yield "| --- | ---: | ---: | ---: | --- | --- | --- |"
    for c in members:
        sides = [_value(c, c.sides[side]) for side in SIDES]
        yield f"| {' | '.join([_label(c), *sides, *_judged(c)])} |"


def _judged(c: Comparison) -> list[str]:
    """Cells: difference, interval, pairs, verdict (bold where a difference is shown)."""
    d, metric = c.difference, c.metric
    if d is None:
        whole = WHOLE_OF.get(metric.name)
        why = f"see {metric_of(whole).label}" if whole else "no step in which both sides recorded it"
        return ["none", "none", "none", why]
    words = verdict(metric, d)
    return [
        amount(metric, d, d.value, "+"),
        _interval(c, d),
        _pairs(c, d),
        bold(words, c, d),
    ]


def _interval(c: Comparison, d: Difference) -> str:
    if d.low is None or d.high is None:
        return "none"
    return f"{bare(d, d.low, '+')} to {amount(c.metric, d, d.high, '+')}"


def _pairs(c: Comparison, d: Difference) -> str:
    if len(d.pairs) > MOST_PAIRS:
        low, high = min(d.pairs), max(d.pairs)
        return f"{bare(d, low, '+')} to {amount(c.metric, d, high, '+')} ({len(d.pairs)} pairs)"
    *others, last = d.pairs
    return ", ".join([*(bare(d, x, "+") for x in others), amount(c.metric, d, last, "+")])


def _label(c: Comparison) -> str:
    return c.metric.label.replace("|", "\\|")


def _value(c: Comparison, summary: Summary | None) -> str:
    """Mean and spread, and in how many steps it was recorded where that is not all."""
    if summary is None:
        return "not recorded"
    spread = "" if summary.spread is None else f" ± {number(summary.spread, digits=2)}"
    steps = "" if summary.steps == c.steps else f" (in {summary.steps} of {c.steps} steps)"
    return with_unit(number(summary.mean) + spread, c.metric) + steps


def percentiles(record: Record, found: Sequence[Comparison]) -> Iterator[str]:
    """Of the time that the tier is about; a percentile that so few steps cannot have is said to be none."""
    wanted = [c for c in found if not c.missing and c.metric.name == ABOUT[record.tier]]
    if not wanted:
        return
    least = ", ".join(f"p{p} from {steps}" for p, steps in PERCENTILES.items())
    yield from (
        "",
        "#### Percentiles",
        "",
        f"Over the steps of all repeats together. Given {least} steps on.",
        "",
    )
    yield "| metric | side | steps | " + " | ".join(f"p{p}" for p in PERCENTILES) + " |"
    yield "| --- | --- | ---: | " + " | ".join("---:" for _ in PERCENTILES) + " |"
    for c in wanted:
        for side, summary in c.sides.items():
            assert summary is not None, "wanted are those of both sides"
            cells = [
                with_unit(number(summary.percentiles[p]), c.metric)
                if p in summary.percentiles
                else "too few steps"
                for p in PERCENTILES
            ]
            yield f"| {c.metric.label} | {side} | {summary.steps} | {' | '.join(cells)} |"


def fallbacks(pairs: Sequence[Pair]) -> Iterator[str]:
    yield from ("", "#### Fallbacks", "")
    totals: dict[str, dict[str, int]] = {}
    for i, side in enumerate(SIDES):
        for pair in pairs:
            for operator, calls in pair[i].fallbacks.items():
                totals.setdefault(operator, dict.fromkeys(SIDES, 0))[side] += calls
    if not any(calls for counts in totals.values() for calls in counts.values()):
        yield "No operator that was asked to run a kernel ran anything else."
        return
    yield "Calls of operators that ran no kernel, all steps and repeats together:"
    yield from ("", f"| operator | {BASELINE} | {RL_KERNEL} |", "| --- | ---: | ---: |")
    yield from (
        f"| {name} | {counts[BASELINE]:,} | {counts[RL_KERNEL]:,} |"
        for name, counts in sorted(totals.items())
    )
