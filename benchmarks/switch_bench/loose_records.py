"""Reads the runs in any JSON record that has numbers step by step.

Three forms count, anywhere in the file: an object with a list of numbers under the name of a metric; a list of objects,
one per step, each with its number; an object with such a list under one of NAMES. Medians and means are not steps.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeGuard

from slime.tracking.metrics import LOGPROB_DIFF
from switch_bench.curves import PEAKS, REWARD
from switch_bench.record import Repeat, read_json
from switch_bench.verdicts import STEP
from vime.view.measures import METRICS
from vime.view.run_metrics import TIME_METRICS

NAMES = {
    "step_s": STEP,
    "rollout_s": "perf/rollout_time",
    "train_s": "perf/train_time",
    "update_s": "perf/update_weights_time",
    "optimizer_s": "perf/optimizer_time",
    "trainer_peak_gib": PEAKS[0],
    "abs_dlogp_mean": LOGPROB_DIFF,
    "consistency/abs_dlogp_mean": LOGPROB_DIFF,
    "reward": REWARD,
    "rewards": REWARD,
}
"""Name in the record of a script -> metric."""
MOST_OF_NAME = 16
"""Largest length of a text that names a run, in characters; a longer text is a remark."""
NAMELESS = ("runs", "steps", "sessions")
"""Keys that do not identify a run."""
STEP_NUMBERS = ("step", "rollout/step", "rollout_id")
KNOWN = {**{name: name for name in (*METRICS, *TIME_METRICS, *PEAKS)}, **NAMES}


def read_runs(path: Path) -> dict[str, Repeat]:
    """Returns name of a run (its path in the file) -> the run; empty for a record without steps."""
    found: dict[str, Repeat] = {}
    for order, (name, steps) in enumerate(_runs(read_json(path, "measure again"), "")):
        plain = name or path.stem
        given, number = plain, 2
        while given in found:
            given, number = f"{plain} ({number})", number + 1
        found[given] = Repeat(order, given, True, steps, {}, {}, {})
    return found


def _runs(value: object, name: str) -> Iterator[tuple[str, list[dict[str, float]]]]:
    if isinstance(value, Mapping):
        columns = _columns(value)
        inside = [item for item in value.values() if isinstance(item, Mapping) and columns]
        for item in inside:  # For example the parts of its steps.
            columns |= _columns(item)
        if columns:
            places = range(max(map(len, columns.values())))
            yield name, [{key: float(c[i]) for key, c in columns.items() if i < len(c)} for i in places]
        for key, item in value.items():
            if not any(item is part for part in inside):
                yield from _runs(item, name if key in NAMELESS else _joined(name, key))
    elif isinstance(value, list) and value and all(isinstance(item, Mapping) for item in value):
        if all(any(number in item for number in STEP_NUMBERS) for item in value):
            steps = [
                {KNOWN[k]: float(v) for k, v in item.items() if k in KNOWN and _numbers([v])}
                for item in value
            ]
            if any(steps):
                yield name, steps
            return
        for i, item in enumerate(value):
            yield from _runs(item, _joined(name, _told(item) or str(i)))


def _columns(value: Mapping[str, object]) -> dict[str, Sequence[float]]:
    return {KNOWN[key]: item for key, item in value.items() if key in KNOWN and _numbers(item)}


def _joined(name: str, part: str) -> str:
    return f"{name}, {part}" if name else part


def _told(item: Mapping[str, object]) -> str:
    """Returns the short words and whole numbers that distinguish an object of a list from the next object."""
    told = []
    for key, value in item.items():
        if isinstance(value, int) and not isinstance(value, bool):
            told.append(f"{key} {value}")
        elif isinstance(value, str) and 0 < len(value) <= MOST_OF_NAME:
            told.append(value)
    return ", ".join(told)


def _numbers(value: object) -> TypeGuard[Sequence[float]]:
    return (
        isinstance(value, Sequence)
        and not isinstance(value, str)
        and len(value) > 0
        and all(isinstance(x, int | float) and not isinstance(x, bool) and math.isfinite(x) for x in value)
    )
