"""Types of the functions that a run calls, for editors and type checkers.

    import vime.types as vt

    def reward(args: vt.Args, sample: vt.Sample) -> float:
        return float(sample.label in sample.response)

    checked: vt.Reward = reward

`HOOKS` maps each flag of a function to its type. Arguments are passed by position unless a type names them.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from slime.types import Metadata, SampleGroup, SamplingParams
from slime.types import Reward as RewardValue
from slime.types import Sample as Sample

if TYPE_CHECKING:
    from slime.rollout.filter_hub.base_types import DynamicFilterOutput
    from slime.tracking.samples import SampleRecord

Args: TypeAlias = Namespace
"""The flags of the run, by their names with underscores, and values that only a run has."""


class Reward(Protocol):
    """--custom-rm-path, or a name of --rm-type: the reward of one sample."""

    def __call__(self, args: Args, sample: Sample, /) -> RewardValue | Awaitable[RewardValue]: ...


class GroupReward(Protocol):
    """--custom-rm-path with --group-rm: one reward for each sample of a prompt, in order."""

    def __call__(
        self, args: Args, samples: list[Sample], /
    ) -> Sequence[RewardValue] | Awaitable[Sequence[RewardValue]]: ...


TrlReward: TypeAlias = (
    Callable[..., Sequence[float | None]] | Callable[..., Awaitable[Sequence[float | None]]]
)
"""A reward of TRL: f(prompts, completions, **columns) -> one number or None per completion."""
VerlReward: TypeAlias = (
    Callable[..., float | dict[str, Any]] | Callable[..., Awaitable[float | dict[str, Any]]]
)
"""A reward of verl: f(data_source, solution_str, ground_truth, extra_info) -> a number, or a dict with `score`."""
AnyReward: TypeAlias = Reward | GroupReward | TrlReward | VerlReward
"""Every form of a reward that a run can call."""


class Generate(Protocol):
    """--custom-generate-function-path: fills the response of a sample. Several samples are parts of one trajectory."""

    def __call__(
        self, args: Args, sample: Sample, sampling_params: SamplingParams, /
    ) -> Awaitable[Sample | list[Sample]]: ...


class SampleHook(Protocol):
    """--rollout-sample-hook-path: changes a sample after its generation, before its reward."""

    def __call__(self, args: Args, sample: Sample, /) -> Sample | Awaitable[Sample | None] | None: ...


class Filter(Protocol):
    """--dynamic-sampling-filter-path: True if the group is trained on."""

    def __call__(self, args: Args, samples: SampleGroup, /) -> bool | DynamicFilterOutput: ...


class GroupsFilter(Protocol):
    """--rollout-sample-filter-path: changes the groups of a rollout in place."""

    def __call__(self, args: Args, groups: list[SampleGroup], /) -> None: ...


class BufferFilter(Protocol):
    """--buffer-filter-path: takes groups from the buffer."""

    def __call__(
        self, args: Args, rollout_id: int | None, buffer: list[SampleGroup], num_samples: int, /
    ) -> list[SampleGroup]: ...


class RewardPostProcess(Protocol):
    """--custom-reward-post-process-path: returns the raw rewards and the rewards to train on."""

    def __call__(self, args: Args, samples: list[Sample], /) -> tuple[Sequence[float], Sequence[float]]: ...


class ConvertSamples(Protocol):
    """--custom-convert-samples-to-train-data-path: returns the columns of the train data."""

    def __call__(self, args: Args, samples: list[Sample], /) -> Mapping[str, Any]: ...


class RolloutLog(Protocol):
    """--custom-rollout-log-function-path: logs a rollout. True leaves out the metrics of the run."""

    def __call__(
        self,
        rollout_id: int,
        args: Args,
        samples: list[Sample],
        metrics: dict[str, float] | None,
        rollout_time: float,
        /,
    ) -> bool | None: ...


class EvalRolloutLog(Protocol):
    """--custom-eval-rollout-log-function-path: logs an evaluation. True leaves out the metrics of the run."""

    def __call__(
        self, rollout_id: int, args: Args, data: dict[str, Any], metrics: dict[str, float] | None, /
    ) -> bool | None: ...


class RunHandle(Protocol):
    """The run that a callback gets (docs/python-api.md)."""

    dir: Path

    @property
    def metrics(self) -> list[dict[str, float]]: ...

    @property
    def evaluations(self) -> list[dict[str, float]]: ...

    @property
    def samples(self) -> list[SampleRecord]: ...

    def samples_from(self, rollout: int) -> list[SampleRecord]: ...

    def stop(self) -> None: ...


class Callback(Protocol):
    """A callback of `vime.train`: called in the caller's process after each rollout, with the run and the rollout's
    metrics. `run.stop()` ends the run."""

    def __call__(self, run: RunHandle, metrics: dict[str, float], /) -> object: ...


HOOKS: Mapping[str, type] = {
    "custom_rm_path": Reward,
    "custom_generate_function_path": Generate,
    "rollout_sample_hook_path": SampleHook,
    "dynamic_sampling_filter_path": Filter,
    "rollout_sample_filter_path": GroupsFilter,
    "buffer_filter_path": BufferFilter,
    "custom_reward_post_process_path": RewardPostProcess,
    "custom_convert_samples_to_train_data_path": ConvertSamples,
    "custom_rollout_log_function_path": RolloutLog,
    "custom_eval_rollout_log_function_path": EvalRolloutLog,
}
"""Maps the field of a flag to the type of its function. Functions of the trainer get tensors (docs/hooks.md)."""

__all__ = [
    "HOOKS",
    "AnyReward",
    "Args",
    "BufferFilter",
    "Callback",
    "ConvertSamples",
    "EvalRolloutLog",
    "Filter",
    "Generate",
    "GroupReward",
    "GroupsFilter",
    "Metadata",
    "Reward",
    "RewardPostProcess",
    "RewardValue",
    "RolloutLog",
    "RunHandle",
    "Sample",
    "SampleGroup",
    "SampleHook",
    "SamplingParams",
    "TrlReward",
    "VerlReward",
]
