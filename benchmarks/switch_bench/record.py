"""bench.json: the measurements of a benchmark with runs, for baseline and rl_kernel. This module defines the schema.

A benchmark directory has bench.json and, for tiers of whole runs, the run directories. The record has every number step
by step; the report (switch_bench.report) computes means and percentiles.
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
"""Times from which speeds are computed. They, and speeds, must not be zero."""


@dataclass(frozen=True)
class Repeat:
    """A run of a side.

    `order` is its index among all runs of the benchmark in the order of their starts. `steps` has {metric: value} per
    step, with the warm-up first; a step has only the metrics that it reported. `config` is the resolved configuration.
    `fallbacks` is {operator: calls that ran no kernel} over all steps. `finished` is true if all steps exist.
    `evaluations` is {number of trained rollouts: {evaluation set: mean reward}} for runs that evaluate.
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
    """The configuration field in which the sides differ, and its value per side."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    field: str
    baseline: Any
    rl_kernel: Any

    def of(self, side: str) -> object:
        value: object = getattr(self, side)
        return value


@dataclass(frozen=True)
class Record:
    """A benchmark. `switch` is the only difference between its sides.

    `sides` has the repeats per side; repeat i pairs with repeat i of the other side. `warm_up` is the number of steps
    per repeat that do not count. `claim` is the name of a difference, for the title of the report ("R3 against R3 +
    rl_kernel"). `notes` has reductions of the model and other facts for readers. `experts` is the number of routed
    experts of a layer, 0 for a dense model. `preset` is the preset of the benchmark's file, None without a preset.
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
    """Reads the record in `directory`. ValueError, with file and field, if it is not a record."""
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
    """Reads a JSON file. ValueError, with the remedy, for other content."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} must be JSON, got {error}; {remedy}") from error


_TYPES = TypeAdapter(Record)


def check(record: Record, path: Path | str) -> None:
    """Raises a ValueError for a record that a report cannot read."""
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
    """Returns both sides' repeats, in the order of their starts."""
    return by_order(repeat for repeats in record.sides.values() for repeat in repeats)


def by_order(repeats: Iterable[Repeat]) -> list[Repeat]:
    return sorted(repeats, key=lambda repeat: repeat.order)


def _can_be(name: str, value: float) -> bool:
    unit = METRICS[name][1] if name in METRICS else "s" if name.endswith("_time") else ""
    if name in NEVER_ZERO or unit == "tokens/s":
        return math.isfinite(value) and value > 0
    return math.isfinite(value) and (unit not in NEVER_NEGATIVE or value >= 0)
