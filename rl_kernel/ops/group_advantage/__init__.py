"""`group_advantage`: rewards relative to the other rollouts of the same prompt."""

from __future__ import annotations

import torch
from torch import Tensor

from rl_kernel.checks import INTEGERS, check_constant, check_number, check_tensor, invalid
from rl_kernel.ops.group_advantage.reference import group_advantage_reference


def group_advantage(
    rewards: Tensor,
    group_ids: Tensor,
    *,
    normalize_std: bool = True,
    eps: float = 1e-6,
    rollout_ids: Tensor | None = None,
) -> Tensor:
    """Per group g: `(rewards[g] - rewards[g].mean()) / (rewards[g].std(correction=1) + eps)`.

    Args:
        rewards: [S] float, finite; a constant.
        group_ids: [S] int64 or int32: samples with equal ids form a group, wherever they stand.
        normalize_std: False leaves the division out (Dr. GRPO).
        eps: > 0; added to the standard deviation.
        rollout_ids: [S]: samples with equal ids are siblings, parts of one rollout that fanned out. Each
            rollout then counts once in mean and std, with the mean reward of its siblings.

    Returns:
        [S] float32. A group of one rollout is not divided (its deviation is unknown), so one sample alone
        gets 0.

    Raises:
        ValueError: wrong shape, dtype or device, a reward that is not finite, siblings in two groups.

    Sums in float64 in batch order: deterministic on every device, and equal rewards give exactly 0.
    Source: GRPO (Shao et al. 2024).
    """
    check_tensor("rewards", rewards, ["S"])
    check_constant(rewards=rewards)
    check_tensor("group_ids", group_ids, rewards.shape, INTEGERS, device=rewards.device)
    if rollout_ids is not None:
        check_tensor("rollout_ids", rollout_ids, rewards.shape, INTEGERS, device=rewards.device)
    check_number("eps", eps, above=0.0)
    finite = torch.isfinite(rewards)
    if not finite.all():
        sample = int((~finite).nonzero()[0])
        got = f"{rewards[sample].item()} for sample {sample}"
        raise invalid("rewards", "be finite", got, "make the reward function return a number")
    if rewards.numel() == 0:
        return rewards.float()
    return group_advantage_reference(rewards, group_ids, rollout_ids, normalize_std, eps)
