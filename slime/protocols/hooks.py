"""This module defines the types of hook functions for a type checker: `score: Reward` in a user's file.

Each type is a call that `slime.config.hook_calls.CALLS` lists. `args` has an attribute for each flag of the run. The
data source of --data-source-path is `slime.protocols.DataSource`, and the type of --selected-logprob-provider is
`slime.algo.selected_log_probs.SelectedLogprobProvider`.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Protocol, TypeAlias

from slime.protocols.training import DataSource
from slime.types import Sample

Score: TypeAlias = float | Mapping[str, object]
"""A number, or an object with a number under the key --reward-key."""


Reward: TypeAlias = Callable[[Namespace, Sample], Score | Awaitable[Score]]
"""--custom-rm-path and a function of --rm-type, without --group-rm: (args, sample)."""

GroupReward: TypeAlias = Callable[[Namespace, list[Sample]], Sequence[Score] | Awaitable[Sequence[Score]]]
"""--custom-rm-path with --group-rm: (args, samples). Returns a score for each sample of a group, in order."""

Generate: TypeAlias = Callable[[Namespace, Sample, dict[str, object]], Awaitable[Sample | list[Sample]]]
"""--custom-generate-function-path: (args, sample, sampling_params). Returns the sample with its response, or several
samples of one trajectory."""

SampleHook: TypeAlias = Callable[[Namespace, Sample], object]
"""--rollout-sample-hook-path: (args, sample). Changes a sample before its reward is computed."""


class KeepDecision(Protocol):
    """`slime.rollout.filter_hub.base_types.DynamicFilterOutput`, or an object with this attribute."""

    keep: bool


DynamicFilter: TypeAlias = Callable[[Namespace, list[Sample]], KeepDecision | bool]
"""--dynamic-sampling-filter-path: (args, samples). Returns whether the run trains on a group."""

SampleFilter: TypeAlias = Callable[[Namespace, list[list[Sample]]], object]
"""--rollout-sample-filter-path: (args, groups). Sets `remove_sample` of samples that are not trained on."""

BufferFilter: TypeAlias = Callable[[Namespace, None, list[list[Sample]], int], list[list[Sample]]]
"""--buffer-filter-path: (args, rollout_id, buffer, num_samples). Takes at most `num_samples` groups out of the buffer
and returns them. `rollout_id` is always None."""


class Rollout(Protocol):
    """--rollout-function-path and --eval-function-path: a whole rollout."""

    def __call__(
        self, args: Namespace, rollout_id: int, data_source: DataSource, /, *, evaluation: bool
    ) -> object: ...


RolloutLog: TypeAlias = Callable[[int, Namespace, list[Sample], dict[str, object], float], object]
"""--custom-rollout-log-function-path: (rollout_id, args, samples, metrics, rollout_time). Returns true if the run must
not log the metrics itself."""

RewardPostProcess: TypeAlias = Callable[[Namespace, list[Sample]], tuple[list[float], list[float]]]
"""--custom-reward-post-process-path: (args, samples). Returns (rewards to log, rewards to train on), a number per
sample, in order."""

TrainData: TypeAlias = Callable[[Namespace, list[Sample]], dict[str, list[object]]]
"""--custom-convert-samples-to-train-data-path: (args, samples). Returns columns of one value per sample."""
