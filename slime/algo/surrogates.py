"""The policy-gradient terms of a token. Pure functions of tensors."""

from __future__ import annotations

import torch
from torch import Tensor


def compute_policy_loss(
    ppo_kl: Tensor, advantages: Tensor, eps_clip: float, eps_clip_high: float, eps_clip_c: float | None = None
) -> tuple[Tensor, Tensor]:
    """`torch.maximum(-r * A, -r.clamp(1 - eps_clip, 1 + eps_clip_high) * A)` with `r = (-ppo_kl).exp()`.

    With `eps_clip_c` (above 1) the loss of a token with A < 0 is at most `-eps_clip_c * A` (dual clip, 1912.09729).
    Returns the loss and 1.0 where the clip was active, both the shape of `ppo_kl`. PPO: 1707.06347.
    """
    ratio = (-ppo_kl).exp()
    plain = -ratio * advantages
    clipped = -ratio.clamp(1 - eps_clip, 1 + eps_clip_high) * advantages
    loss = torch.maximum(plain, clipped)
    active = (clipped > plain).float()
    if eps_clip_c is not None:
        if eps_clip_c <= 1:
            raise ValueError(
                f"--eps-clip-c must be above 1, got {eps_clip_c}; leave it out to turn dual clip off"
            )
        loss = torch.where(advantages < 0, torch.minimum(loss, -eps_clip_c * advantages), loss)
    return loss, active


def compute_cispo_loss(
    ppo_kl: Tensor, log_probs: Tensor, advantages: Tensor, eps_clip: float, eps_clip_high: float
) -> tuple[Tensor, Tensor]:
    """`-r.clamp(1 - eps_clip, 1 + eps_clip_high).detach() * A * log_probs` and 1.0 where clipped (2506.13585)."""
    ratio = (-ppo_kl).exp().detach()
    bounded = ratio.clamp(1 - eps_clip, 1 + eps_clip_high)
    return -bounded * advantages * log_probs, (bounded != ratio).float()
