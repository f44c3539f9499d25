"""bench.json: what one benchmark of runs measured, baseline beside rl_kernel. Owns the schema.

A benchmark directory holds bench.json and, for tiers of whole runs, the run directories it was read from. Every number
is kept as it was measured, step by step; means and percentiles are the report's (switch_bench.report).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError

from vime.view.measures import METRICS

SCHEMA = 2
RECORD_FILE, OPERATORS_FILE = "bench.json", "operators.json"
TIERS = ("module", "e2e")
BASELINE, RL_KERNEL = "baseline", "rl_kernel"
SIDES = (BASELINE, RL_KERNEL)

NEVER_NEGATIVE = ("s", "ms", "GiB")
NEVER_ZERO = ("perf/step_time", "perf/rollout_time", "perf/actor_train_time")
"""What speeds are taken over. A speed of zero is no speed either."""


@dataclass(frozen=True)
class Repeat:
    """One run of one side.

    `order`: its place among all runs of the benchmark as they started, from 0. `steps`: {metric: value} a step, the
    warm-up first; a metric that a step did not report is not in it. `config`: what the run was resolved to.
    `fallbacks`: {operator: calls that ran no kernel}, all steps together. `finished`: every step asked for is there.
    `evaluations`: {rollouts that were trained on before: {evaluation set: mean reward}}, of runs that evaluate.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    order: int
    run: str
    finished: bool
    steps: list[dict[str, float]]
    config: dict[str, Any]
    environment: dict[str, Any]
    fallbacks: dict[str, int]
    evaluations: dict[str, dict[str, float]] = field(default_factory=dict)


@dataclass(frozen=True)
class Switch:
    """The configuration field in which the sides differ, and its value on each."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    field: str
    baseline: Any
    rl_kernel: Any

    def of(self, side: str) -> object:
        value: object = getattr(self, side)
        return value


@dataclass(frozen=True)
class Record:
    """One benchmark. `switch`: the one thing that differs.

    `sides`: of each as many repeats, the i-th of one pairs with the i-th of the other, whenever they ran.
    `warm_up`: steps of each repeat that count for nothing. `claim`: what a difference may be called, a title of the
    report ("R3 against R3 + rl_kernel"). `notes`: what is reduced, and other things a reader has to know. `experts`:
    routed ones of a layer, 0 of a dense model. `preset`: of the file that describes it, None for the file as it stands.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    tier: str
    name: str
    claim: str
    command: str
    notes: list[str]
    switch: Switch
    warm_up: int
    sides: dict[str, list[Repeat]]
    preset: str | None
    experts: int

    def write(self, directory: Path) -> Path:
        path = directory / RECORD_FILE
        check(self, path)
        path.write_text(
            json.dumps({"schema": SCHEMA, **asdict(self)}, indent=1, allow_nan=False) + "\n", encoding="utf-8"
        )
        return path


def read(directory: Path) -> Record:
    """The record in `directory`. ValueError when it is not one, naming file and field."""
    path = directory / RECORD_FILE
    if not path.is_file():
        raise ValueError(f"{directory} must hold {RECORD_FILE}, got none; `vime bench` writes it")
    content = read_json(path, "measure again")
    if not isinstance(content, dict) or content.pop("schema", None) != SCHEMA:
        raise ValueError(f"{path} must be of schema {SCHEMA}; measure again with this version")
    try:
        record = _TYPES.validate_json(json.dumps(content), strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"])) or "it"
        raise ValueError(
            f"{path} must have the fields of switch_bench.record.Record, got {field}: {first['msg']} "
            f"({error.error_count()} such in all)"
        ) from error
    check(record, path)
    return record


def read_json(path: Path, remedy: str) -> Any:
    """The content of a file. ValueError, with the remedy, when it is no JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} must be JSON, got {error}; {remedy}") from error


_TYPES = TypeAdapter(Record)


def check(record: Record, path: Path | str) -> None:
    """ValueError for a record that no report could read."""
    if record.tier not in TIERS:
        raise ValueError(f"{path}: tier must be one of {', '.join(TIERS)}, got {record.tier!r}")
    sizes = {side: len(repeats) for side, repeats in record.sides.items()}
    if sizes.keys() != set(SIDES) or len(set(sizes.values())) > 1 or not all(sizes.values()):
        raise ValueError(f"{path}: sides must be {' and '.join(SIDES)}, with as many repeats, got {sizes}")
    if record.warm_up < 0:
        raise ValueError(f"{path}: warm_up must be 0 steps or more, got {record.warm_up}")
    finished = {len(repeat.steps) for repeat in all_repeats(record) if repeat.finished}
    if len(finished) > 1 or any(steps <= record.warm_up for steps in finished):
        raise ValueError(
            f"{path}: finished repeats must have one number of steps, above warm_up ({record.warm_up}), got {finished}"
        )
    places = [repeat.order for repeat in all_repeats(record)]
    if len(set(places)) < len(places):
        raise ValueError(f"{path}: each run must have an order of its own, got {places}")
    for repeat in all_repeats(record):
        for k, step in enumerate(repeat.steps):
            bad = {name: value for name, value in step.items() if not _can_be(name, value)}
            if bad:
                raise ValueError(
                    f"{path}: {repeat.run}, step {k}: values must be finite, times and memory not negative, steps and "
                    f"speeds above 0, got {bad}"
                )


def all_repeats(record: Record) -> list[Repeat]:
    """Those of both sides, in the order they ran."""
    return by_order(repeat for repeats in record.sides.values() for repeat in repeats)


def by_order(repeats: Iterable[Repeat]) -> list[Repeat]:
    return sorted(repeats, key=lambda repeat: repeat.order)


def _can_be(name: str, value: float) -> bool:
    unit = METRICS[name][1] if name in METRICS else "s" if name.endswith("_time") else ""
    if name in NEVER_ZERO or unit == "tokens/s":
        return math.isfinite(value) and value > 0
    return math.isfinite(value) and (unit not in NEVER_NEGATIVE or value >= 0)
