"""`group_advantage`: rewards relative to the other rollouts of the same prompt."""

from __future__ import annotations

import torch
from torch import Tensor

from rl_kernel.checks import INTEGERS, check_constant, check_number, check_tensor, invalid
from rl_kernel.dispatch import choose, float64_refusal
from rl_kernel.mode import reads_values
from rl_kernel.ops.group_advantage.reference import check_siblings, group_advantage_reference
from rl_kernel.telemetry import record, timed


def group_advantage(
    rewards: Tensor,
    group_ids: Tensor,
    *,
    normalize_std: bool = True,
    eps: float = 1e-6,
    rollout_ids: Tensor | None = None,
    impl: str | None = None,
) -> Tensor:
    """Computes, per group g, `(rewards[g] - rewards[g].mean()) / (rewards[g].std(correction=1) + eps)`.

    Args:
        rewards: [S] float, finite; a constant.
        group_ids: [S] int64 or int32. Samples with equal ids form a group, at any positions in the batch.
        normalize_std: False omits the division (Dr. GRPO).
        eps: > 0; added to the standard deviation.
        rollout_ids: [S]. Samples with equal ids are siblings, parts of a rollout that was split. Each rollout then
            counts once in mean and std, with the mean reward of its siblings.
        impl: names the implementation, "reference" or "triton", for tests and comparisons.

    Returns:
        [S] float32. A group of one rollout is not divided, because its deviation is unknown. A single sample gets 0.

    Raises:
        ValueError: wrong shape, dtype or device, a reward that is not finite, siblings in two groups. On a device,
            values are read in strict mode only. In the other modes, a reward that is not finite makes its own group
            wrong, and siblings in two groups make all of their groups NaN.
        Refused: the mode or `impl` demands the fast implementation and it cannot run.

    Sums are in float64, in an order that depends only on the batch: deterministic on every device, and equal rewards
    give exactly 0. On a device every sample is compared with all others, S**2 comparisons: meant for a few thousand
    samples.
    Source: GRPO (Shao et al. 2024).
    """
    check_tensor("rewards", rewards, ["S"])
    check_constant(rewards=rewards)
    check_tensor("group_ids", group_ids, rewards.shape, INTEGERS, device=rewards.device)
    if rollout_ids is not None:
        check_tensor("rollout_ids", rollout_ids, rewards.shape, INTEGERS, device=rewards.device)
    check_number("eps", eps, above=0.0)
    choice = choose("group_advantage", rewards.device, impl, float64_refusal(rewards))
    record(choice, rewards.numel())
    if reads_values(rewards):
        _check_finite(rewards)
    # The reference waits for the device anyway, and it cannot handle siblings in two groups.
    if rollout_ids is not None and (choice.implementation == "reference" or reads_values(rewards)):
        check_siblings(group_ids, rollout_ids)
    with timed("group_advantage", rewards.device):
        if rewards.numel() == 0:
            return rewards.float()
        if choice.implementation == "triton":
            from rl_kernel.ops.group_advantage.kernels import group_advantage_triton

            return group_advantage_triton(rewards, group_ids, rollout_ids, normalize_std, eps)
        return group_advantage_reference(rewards, group_ids, rollout_ids, normalize_std, eps)


def _check_finite(rewards: Tensor) -> None:
    finite = torch.isfinite(rewards)
    if not finite.all():
        sample = int((~finite).nonzero()[0])
        got = f"{rewards[sample].item()} for sample {sample}"
        raise invalid("rewards", "be finite", got, "make the reward function return a number")
