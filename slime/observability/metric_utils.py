"""Import path of slime plug-ins: see slime.rollout.metrics."""

from collections.abc import Mapping, Sequence
from typing import TypeVar

from slime.rollout.metrics import compute_statistics as compute_statistics
from slime.rollout.metrics import ends_in_repetition as has_repetition
from slime.rollout.metrics import pass_rate

__all__ = [
    "compute_pass_rate",
    "compute_rollout_step",
    "compute_statistics",
    "dict_add_prefix",
    "has_repetition",
]
T = TypeVar("T")


def dict_add_prefix(d: Mapping[str, T], prefix: str) -> dict[str, T]:
    """Returns `{prefix + name: value}`."""
    return {prefix + name: value for name, value in d.items()}


def compute_pass_rate(
    flat_rewards: Sequence[float], group_size: int, num_groups: int | None = None
) -> dict[str, float]:
    """Returns pass@1, pass@2, pass@4, ... of consecutive groups: see `slime.rollout.metrics.pass_rate`.

    Groups with a single reward have no metric. Raises ValueError if `flat_rewards` are not `num_groups` whole groups.
    """
    if group_size == 1:
        return {}
    count = len(flat_rewards) // group_size if num_groups is None else num_groups
    if not count or len(flat_rewards) != count * group_size:
        raise ValueError(
            f"flat_rewards must be whole groups of {group_size}, got {len(flat_rewards)} rewards"
            f"{'' if num_groups is None else f' for {num_groups} groups'}; group the samples by group_index"
        )
    return pass_rate(flat_rewards[i * group_size : (i + 1) * group_size] for i in range(count))


def compute_rollout_step(args: object, rollout_id: int) -> int:
    """Returns the step of rollout/step and eval/step: `rollout_id`. --wandb-always-use-train-step changes it on its way
    to W&B, so `args` is not read."""
    return rollout_id
