"""bench.json: what one benchmark of runs measured, baseline beside rl_kernel. Owns the schema.

A benchmark directory holds bench.json and, for tiers of whole runs, the run directories it was read from. Every number
is kept as it was measured, step by step; means and percentiles are the report's (vime.bench.report).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError

SCHEMA = 2
RECORD_FILE, OPERATORS_FILE = "bench.json", "operators.json"
TIERS = ("module", "e2e")
BASELINE, RL_KERNEL = "baseline", "rl_kernel"
SIDES = (BASELINE, RL_KERNEL)

PASS_TIME = "perf/pass_time"
"""The sum of three others, in the place of which it is compared (vime.bench.verdicts)."""
# metric of a run's steps -> (what it is, unit, whether more is better; None where neither is)
METRICS: dict[str, tuple[str, str, bool | None]] = {
    "perf/step_time": ("step", "s", False),
    "perf/rollout_time": ("rollout", "s", False),
    "perf/train_wait_time": ("waiting for the rollout", "s", False),
    "perf/log_probs_time": ("old log-probs", "s", False),
    "perf/ref_log_probs_time": ("reference log-probs", "s", False),
    "perf/forward_time": ("forward", "s", False),
    "perf/policy_loss_time": ("log-probs, ratio, KL and loss", "s", False),
    "rl_kernel/ratio_kl/ms": ("ratio and KL alone", "ms", False),
    "rl_kernel/grpo_loss/ms": ("clipped loss alone", "ms", False),
    "perf/backward_time": ("backward", "s", False),
    PASS_TIME: ("forward + loss + backward", "s", False),
    "perf/optimizer_time": ("optimizer", "s", False),
    "perf/update_weights_time": ("weights to engines", "s", False),
    "perf/actor_train_time": ("training", "s", False),
    "perf/step_tokens_per_sec": ("tokens, whole step", "tokens/s", True),
    "perf/step_tokens_per_gpu_per_sec": ("tokens, whole step, per GPU", "tokens/s", True),
    "perf/tokens_per_gpu_per_sec": ("rollout, response tokens per GPU", "tokens/s", True),
    "perf/actor_train_tok_per_s": ("training, tokens", "tokens/s", True),
    "perf/trainer_peak_gib": ("trainer, peak memory", "GiB", False),
    "perf/forward_peak_gib": ("forward, peak memory", "GiB", False),
    "perf/policy_loss_peak_gib": ("loss, peak memory", "GiB", False),
    "perf/backward_peak_gib": ("backward, peak memory", "GiB", False),
    "perf/optimizer_peak_gib": ("optimizer, peak memory", "GiB", False),
    "rollout/raw_reward": ("raw_reward", "", True),
    "rollout/response_len/mean": ("response length", "tokens", None),
    "train/train_rollout_logprob_abs_diff": ("train_rollout_logprob_abs_diff", "nats", False),
    "train/ppo_kl": ("KL to the policy that sampled", "nats", None),
    "train/kl_loss": ("KL to the reference", "nats", None),
    "train/loss": ("loss", "", None),
    "train/grad_norm": ("gradient norm", "", None),
    "rl_kernel/fast": ("operators asked to run a kernel that did", "share", None),
}
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
            f"{path} must have the fields of vime.bench.record.Record, got {field}: {first['msg']} "
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


def flags_of(config: Mapping[str, object]) -> dict[str, Any]:
    """A run's config.json without its sections, and without remarks."""
    sections = (section for section in config.values() if isinstance(section, dict))
    return {name: value for section in sections for name, value in section.items()}


def _can_be(name: str, value: float) -> bool:
    unit = METRICS[name][1] if name in METRICS else "s" if name.endswith("_time") else ""
    if name in NEVER_ZERO or unit == "tokens/s":
        return math.isfinite(value) and value > 0
    return math.isfinite(value) and (unit not in NEVER_NEGATIVE or value >= 0)
