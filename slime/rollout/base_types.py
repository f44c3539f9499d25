"""This module defines the results of rollout functions (`--rollout-function-path`, `--eval-function-path`)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, NotRequired, TypeAlias, TypedDict, overload

from slime.hooks import Hook
from slime.types import Sample, SampleGroup


@dataclass
class RolloutFnTrainOutput:
    """Groups to train on, and metrics under their full names (rollout/..., perf/...)."""

    samples: list[SampleGroup]
    metrics: dict[str, float] | None = None


class EvalResult(TypedDict):
    """The responses of a single evaluation dataset. `rewards` and `truncated` have one entry per trajectory, and leave
    out responses without a reward. If only `samples` is given, the trainer computes the samples' loss."""

    rewards: NotRequired[list[float]]
    truncated: NotRequired[list[bool]]
    samples: NotRequired[list[Sample]]


EvalData: TypeAlias = dict[str, EvalResult]
"""Maps the name of an evaluation dataset to its responses."""


@dataclass
class RolloutFnEvalOutput:
    """The responses of an evaluation per dataset, and metrics under their full names."""

    data: EvalData
    metrics: dict[str, float] | None = None


def iter_samples(groups: Iterable[Sample | list[Sample] | SampleGroup]) -> Iterator[Sample]:
    """Yields the samples of groups, and of trajectories in parts."""
    for one in groups:
        if isinstance(one, Sample):
            yield one
        else:
            yield from iter_samples(one)


@overload
def call_rollout_fn(
    fn: Hook, *args: object, evaluation: Literal[False], **kwargs: object
) -> RolloutFnTrainOutput: ...


@overload
def call_rollout_fn(
    fn: Hook, *args: object, evaluation: Literal[True], **kwargs: object
) -> RolloutFnEvalOutput: ...


def call_rollout_fn(
    fn: Hook, *args: object, evaluation: bool, **kwargs: object
) -> RolloutFnTrainOutput | RolloutFnEvalOutput:
    """Calls a rollout function. Wraps a plain list of groups, or a plain dict of datasets, in its record."""
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
