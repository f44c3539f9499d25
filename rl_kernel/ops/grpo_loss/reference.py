"""`grpo_loss` in plain PyTorch: the definition of correct. Autograd gives its gradient."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rl_kernel.ops.ratio_kl.reference import ratio_kl_reference


@dataclass(frozen=True)
class LossTerms:
    """Coefficients of the objective; `eps_clip_high` is resolved."""

    eps_clip: float
    eps_clip_high: float
    eps_clip_c: float | None
    kl_coef: float
    kl_type: str
    unbiased_kl: bool
    entropy_coef: float


def grpo_loss_reference(
    terms: LossTerms,
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    denominators: Tensor,
    tis_weights: Tensor | None,
    ref_log_probs: Tensor | None,
    entropy: Tensor | None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Inputs [N] of one dtype, float32 or float64 (`denominators`: [N] or a scalar); `mask` [N] bool."""
    ratio, kl = ratio_kl_reference(
        log_probs, old_log_probs, ref_log_probs, mask, terms.kl_type, terms.unbiased_kl
    )
    pg_loss, clipped = _policy_loss(ratio, advantages, terms)
    if tis_weights is not None:
        pg_loss = pg_loss * tis_weights
    total = pg_loss
    if terms.kl_coef != 0:
        total = total + terms.kl_coef * kl
    if terms.entropy_coef != 0:
        assert entropy is not None
        total = total - terms.entropy_coef * entropy
    loss = torch.where(mask, total / denominators, 0.0).sum()
    metrics = {
        "pg_loss": torch.where(mask, pg_loss.detach(), 0.0),
        "pg_clipfrac": (mask & clipped).to(ratio.dtype),
        "ppo_kl": torch.where(mask, (old_log_probs - log_probs).detach(), 0.0),
        "ratio": ratio.detach(),
    }
    if ref_log_probs is not None:
        metrics["kl_loss"] = kl.detach()
    return loss, metrics


def _policy_loss(ratio: Tensor, advantages: Tensor, terms: LossTerms) -> tuple[Tensor, Tensor]:
    """Loss of each token, and where the clip binds. Ties go to the unclipped branch."""
    unclipped = -ratio * advantages
    bounded = -ratio.clamp(1 - terms.eps_clip, 1 + terms.eps_clip_high) * advantages
    clipped = bounded > unclipped
    loss = torch.where(clipped, bounded, unclipped)
    if terms.eps_clip_c is not None:
        ceiling = -terms.eps_clip_c * advantages
        loss = torch.where((advantages < 0) & (loss > ceiling), ceiling, loss)
    return loss, clipped
