"""The types of the functions that flags name, for a type checker: `score: Reward` in a user's file.

Each type is a call as `slime.config.hook_calls.CALLS` lists it. `args` are the flags of the run, each an attribute. The
data source of --data-source-path is `slime.protocols.DataSource`, and the type of --selected-logprob-provider is
`slime.algo.selected_log_probs.SelectedLogprobProvider`.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Awaitable, Mapping, Sequence
from typing import Protocol, TypeAlias

from slime.protocols.training import DataSource
from slime.types import Sample

Score: TypeAlias = float | Mapping[str, object]
"""A number, or an object whose --reward-key is one."""


class Reward(Protocol):
    """--custom-rm-path and a function of --rm-type, without --group-rm."""

    def __call__(self, args: Namespace, sample: Sample, /) -> Score | Awaitable[Score]: ...


class GroupReward(Protocol):
    """--custom-rm-path with --group-rm: a score for each sample of a group, in order."""

    def __call__(
        self, args: Namespace, samples: list[Sample], /
    ) -> Sequence[Score] | Awaitable[Sequence[Score]]: ...


class Generate(Protocol):
    """--custom-generate-function-path. Returns the sample with its response, or several samples of one trajectory."""

    def __call__(
        self, args: Namespace, sample: Sample, sampling_params: dict[str, object], /
    ) -> Awaitable[Sample | list[Sample]]: ...


class SampleHook(Protocol):
    """--rollout-sample-hook-path: changes a sample before its reward."""

    def __call__(self, args: Namespace, sample: Sample, /) -> object: ...


class KeepDecision(Protocol):
    """`slime.rollout.filter_hub.base_types.DynamicFilterOutput`, or an object with this attribute."""

    keep: bool


class DynamicFilter(Protocol):
    """--dynamic-sampling-filter-path: whether to train on a group."""

    def __call__(self, args: Namespace, samples: list[Sample], /) -> KeepDecision | bool: ...


class SampleFilter(Protocol):
    """--rollout-sample-filter-path: sets `remove_sample` of samples that are not trained on."""

    def __call__(self, args: Namespace, groups: list[list[Sample]], /) -> object: ...


class BufferFilter(Protocol):
    """--buffer-filter-path: takes at most `num_samples` groups out of the buffer and returns them. The second argument
    is always None."""

    def __call__(
        self, args: Namespace, rollout_id: None, buffer: list[list[Sample]], num_samples: int, /
    ) -> list[list[Sample]]: ...


class Rollout(Protocol):
    """--rollout-function-path and --eval-function-path: a whole rollout."""

    def __call__(
        self, args: Namespace, rollout_id: int, data_source: DataSource, /, *, evaluation: bool
    ) -> object: ...


class RolloutLog(Protocol):
    """--custom-rollout-log-function-path. Returns true if the run must not log the metrics itself."""

    def __call__(
        self,
        rollout_id: int,
        args: Namespace,
        samples: list[Sample],
        metrics: dict[str, object],
        rollout_time: float,
        /,
    ) -> object: ...


class RewardPostProcess(Protocol):
    """--custom-reward-post-process-path: (rewards to log, rewards to train on), a number per sample, in order."""

    def __call__(self, args: Namespace, samples: list[Sample], /) -> tuple[list[float], list[float]]: ...


class TrainData(Protocol):
    """--custom-convert-samples-to-train-data-path: columns of one value per sample."""

    def __call__(self, args: Namespace, samples: list[Sample], /) -> dict[str, list[object]]: ...
