"""Per-sequence functions of slime's ppo_utils: the KL of GSPO, the mask of --use-opsm and the returns of GRPO."""

from __future__ import annotations

import torch
from torch import Tensor

from slime.algo.importance import opsm_mask
from slime.config.schema import read_section
from slime.config.sections.off_policy import OffPolicyConfig


def compute_gspo_kl(
    full_log_probs: list[Tensor],
    full_old_log_probs: list[Tensor],
    local_log_probs: list[Tensor],
    loss_masks: list[Tensor],
) -> Tensor:
    """Returns the masked mean of `old - new` of each sample, repeated for each of its tokens in `local_log_probs`."""
    means = [
        _masked_mean(old - new, mask)
        for new, old, mask in zip(full_log_probs, full_old_log_probs, loss_masks, strict=True)
    ]
    return torch.cat([mean.expand_as(x) for mean, x in zip(means, local_log_probs, strict=True)])


def compute_opsm_mask(
    args: object,
    full_log_probs: list[Tensor],
    full_old_log_probs: list[Tensor],
    advantages: list[Tensor],
    loss_masks: list[Tensor],
) -> tuple[Tensor, Tensor]:
    """Returns the mask of --use-opsm for all tokens, and the sum of the samples' shares of dropped tokens.

    `args.opsm_delta` is the threshold.
    """
    keep, dropped = [], torch.zeros((), device=advantages[0].device)
    for new, old, advantage, mask in zip(
        full_log_probs, full_old_log_probs, advantages, loss_masks, strict=True
    ):
        rows = torch.zeros(len(advantage), dtype=torch.int64, device=advantage.device)
        mean = _masked_mean(old - new, mask)[None]
        kept, out = opsm_mask(advantage, mean, rows, delta=read_section(OffPolicyConfig, args).opsm_delta)
        keep.append(kept)
        dropped = dropped + out.sum() / mask.sum().clamp(min=1)
    return torch.cat(keep), dropped


def get_grpo_returns(rewards: Tensor, kl: list[Tensor]) -> list[Tensor]:
    """Returns the reward of each sample, repeated for each token of its `kl`."""
    return [torch.full_like(k, float(reward)) for reward, k in zip(rewards, kl, strict=True)]


def _masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    return (values * mask).sum() / mask.sum().clamp(min=1)
