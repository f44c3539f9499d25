"""The built-in dynamic-sampling filters (DAPO, 2503.14476, section 3.2)."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence

import torch

import rl_kernel
from slime.data.trajectories import trajectory_rewards
from slime.rollout.filter_hub.base_types import DynamicFilterOutput
from slime.types import Sample


def check_reward_nonzero_std(
    args: Namespace, samples: Sequence[Sample | list[Sample]], **kwargs: object
) -> DynamicFilterOutput:
    """Drops a group whose rewards are all equal, because its advantages are 0.

    Keeps the group if `rewards.std() > 1e-6` (unbiased). A group with a single sample has no deviation and is dropped.
    The reason is zero_std_{reward}, with one decimal, so the metrics count too easy and too hard prompts
    separately. Siblings with the same rollout_id count once, with the mean of their rewards. A list instead of a sample
    is a trajectory in parts, which share the reward of the first part.
    """
    firsts = [sample[0] if isinstance(sample, list) else sample for sample in samples]
    rewards = trajectory_rewards(firsts, getattr(args, "reward_key", None))
    # The advantages use the same group statistics. In float64, equal rewards are equal to their mean.
    group = torch.zeros(len(rewards), dtype=torch.int64)
    centred = rl_kernel.group_advantage(
        torch.tensor(rewards, dtype=torch.float64), group, normalize_std=False
    )
    if len(rewards) > 1 and centred.square().sum().div(len(rewards) - 1).sqrt() > 1e-6:
        return DynamicFilterOutput(keep=True)
    return DynamicFilterOutput(keep=False, reason=f"zero_std_{round(rewards[0], 1) + 0.0}")


def check_reward_nonzero_std_with_fallback(
    args: Namespace, samples: Sequence[Sample | list[Sample]], **kwargs: object
) -> DynamicFilterOutput:
    """Works as `check_reward_nonzero_std`, but keeps a group without deviation if the rollout would need more
    prompts."""
    output = check_reward_nonzero_std(args, samples, **kwargs)
    output.keep_when_insufficient = True
    return output
