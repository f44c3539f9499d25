"""Import path of slime plug-ins: see slime.rollout.metrics. The names have no prefix (rollout/, perf/, eval/{set}/)."""

from collections.abc import Sequence

from slime.config.schema import Config
from slime.rollout.metrics import group_samples, perf_metrics, sample_metrics
from slime.types import Sample

__all__ = ["compute_metrics_from_samples", "compute_perf_metrics_from_samples"]


def compute_metrics_from_samples(args: object, samples: Sequence[Sample]) -> dict[str, float]:
    """Computes lengths, truncation, repetition, groups of one reward and more: see `sample_metrics`.

    `samples` is one list of at least one sample. Flags that `args` lacks have their defaults. As in slime, the reward
    is that of --reward-key.
    """
    c = Config.from_args(args)
    return sample_metrics(c.logging, c.reward.reward_key, group_samples(_some(samples)))


def compute_perf_metrics_from_samples(
    args: object, samples: Sequence[Sample], rollout_time: float
) -> dict[str, float]:
    """Computes tokens per second, as `perf_metrics` does. `rollout_time` is in seconds."""
    gpus = Config.from_args(args).cluster.rollout_num_gpus
    return perf_metrics(gpus, list(_some(samples)), rollout_time)


def _some(samples: Sequence[Sample]) -> Sequence[Sample]:
    if not len(samples):
        raise ValueError(
            "samples must hold at least one sample, got none; leave out metrics of an empty part"
        )
    return samples
