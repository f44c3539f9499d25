"""What a rollout function returns (`--rollout-function-path`, `--eval-function-path`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, overload

from slime.types import SampleGroup


@dataclass
class RolloutFnTrainOutput:
    """Groups to train on, and metrics under their full names (rollout/..., perf/...)."""

    samples: list[SampleGroup]
    metrics: dict[str, Any] | None = None


@dataclass
class RolloutFnEvalOutput:
    """`data[name]` has "rewards", "truncated" and "samples" of one dataset, one entry per response."""

    data: dict[str, dict[str, Any]]
    metrics: dict[str, Any] | None = None


@overload
def call_rollout_fn(
    fn: Callable[..., Any], *args: Any, evaluation: Literal[False], **kwargs: Any
) -> RolloutFnTrainOutput: ...


@overload
def call_rollout_fn(
    fn: Callable[..., Any], *args: Any, evaluation: Literal[True], **kwargs: Any
) -> RolloutFnEvalOutput: ...


def call_rollout_fn(
    fn: Callable[..., Any], *args: Any, evaluation: bool, **kwargs: Any
) -> RolloutFnTrainOutput | RolloutFnEvalOutput:
    """Call a rollout function. A plain list of groups, or a plain dict of datasets, is wrapped in its record."""
    output = fn(*args, **kwargs, evaluation=evaluation)
    if isinstance(output, RolloutFnEvalOutput if evaluation else RolloutFnTrainOutput):
        return output
    if evaluation and isinstance(output, dict):
        return RolloutFnEvalOutput(output)
    if not evaluation and isinstance(output, list):
        return RolloutFnTrainOutput(output)
    flag, want = ("--rollout-function-path", "RolloutFnTrainOutput")
    if evaluation:
        flag, want = ("--eval-function-path", "RolloutFnEvalOutput")
    name = getattr(fn, "__qualname__", repr(fn))
    raise ValueError(f"{flag} must return {want}, got {type(output).__name__} from {name}; wrap its result")
