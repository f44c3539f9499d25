"""Tables of a report in addition to the comparison: percentiles over steps, and scores on held-out prompts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from slime.tracking.metrics import LOGPROB_DIFF
from slime.tracking.percentiles import PERCENTILES
from switch_bench.compare import Pair
from switch_bench.curves import MIN_STEPS, counted, sides_of
from switch_bench.record import SIDES, Record
from switch_bench.verdicts import Comparison, with_unit
from vime.view.measures import SPEEDS, TIMES, number


def percentile_lines(record: Record, pairs: Sequence[Pair], found: Sequence[Comparison]) -> Iterator[str]:
    """Yields percentiles of times, speeds and log-prob differences over all repeats' counted steps, from 100 steps
    on."""
    steps = sum(len(repeat.steps) - record.warm_up for repeat, _ in pairs)
    if steps < MIN_STEPS:
        yield from ("", f"Percentiles need {MIN_STEPS} steps a side; there are {steps}.")
        return
    names = [f"p{p} {side}" for side in SIDES for p in PERCENTILES]
    yield from (
        "",
        f"Percentiles over {steps} steps a side, repeats together (a speed's p99 is of its fast steps):",
        "",
    )
    yield f"| metric | {' | '.join(names)} |"
    yield f"| --- |{' ---: |' * len(names)}"
    for c in found:
        if c.missing or not (c.metric.unit in (*TIMES, *SPEEDS) or c.metric.name == LOGPROB_DIFF):
            continue
        cells = []
        for repeats in sides_of(pairs).values():
            values = counted(record.warm_up, repeats, c.metric.name)
            enough = len(values) >= MIN_STEPS
            cells += [
                with_unit(number(float(value)), c.metric) if enough else "too few"
                for value in np.percentile(values, PERCENTILES)
            ]
        yield f"| {' | '.join([c.metric.label, *cells])} |"


def evaluation_lines(pairs: Sequence[Pair]) -> Iterator[str]:
    """Yields the mean reward per evaluation set and evaluation: the mean over the repeats, and its gain."""
    sides = sides_of(pairs)
    every = [e for repeats in sides.values() for repeat in repeats for e in repeat.evaluations.items()]
    for name in sorted({name for _, scores in every for name in scores}):
        moments = sorted({int(rollouts) for rollouts, scores in every if name in scores})
        yield from ("", f"Held-out score `{name}`, which no step's time holds:", "")
        yield f"| rollouts trained on | {' | '.join(SIDES)} |"
        yield "| ---: | ---: | ---: |"
        first: dict[str, float] = {}
        for moment in moments:
            cells = []
            for side, repeats in sides.items():
                scores = [r.evaluations.get(str(moment), {}).get(name) for r in repeats]
                known = [score for score in scores if score is not None]
                if not known:
                    cells.append("not evaluated")
                    continue
                mean = float(np.mean(known))
                start = first.setdefault(side, mean)
                cells.append(f"{mean:.4f}" + (f" ({mean - start:+.4f})" if moment != moments[0] else ""))
            yield f"| {moment} | {' | '.join(cells)} |"
