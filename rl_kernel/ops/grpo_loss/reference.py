"""`grpo_loss` in plain PyTorch: the definition of correct. Autograd computes its gradient."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from rl_kernel.ops.ratio_kl.reference import ratio_kl_reference


@dataclass(frozen=True)
class LossTerms:
    """Coefficients of the objective. `eps_clip_high` already has its default."""

    eps_clip: float
    eps_clip_high: float
    eps_clip_c: float | None
    kl_coef: float
    kl_type: str
    unbiased_kl: bool
    entropy_coef: float


@dataclass(frozen=True)
class Columns:
    """Inputs [N] of a call; `denominators` is a number or [N]."""

    log_probs: Tensor
    old_log_probs: Tensor
    advantages: Tensor
    mask: Tensor
    denominators: Tensor | float
    tis_weights: Tensor | None
    ref_log_probs: Tensor | None
    entropy: Tensor | None

    def map(self, change: Callable[[str, Tensor], Tensor]) -> Columns:
        """Returns the columns with each tensor replaced by `change(name, tensor)`."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return Columns(
            **{name: change(name, v) if isinstance(v, Tensor) else v for name, v in values.items()}
        )


def grpo_loss_reference(terms: LossTerms, c: Columns) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns (loss, metrics) from columns of one dtype, float32 or float64, and a bool mask."""
    ratio, kl = ratio_kl_reference(
        c.log_probs, c.old_log_probs, c.ref_log_probs, c.mask, terms.kl_type, terms.unbiased_kl
    )
    pg_loss, clipped = _policy_loss(ratio, c.advantages, terms)
    if c.tis_weights is not None:
        pg_loss = pg_loss * c.tis_weights
    total = pg_loss
    if terms.kl_coef != 0:
        total = total + terms.kl_coef * kl
    if terms.entropy_coef != 0:
        assert c.entropy is not None
        total = total - terms.entropy_coef * c.entropy
    loss = torch.where(c.mask, total / c.denominators, 0.0).sum()
    metrics = {
        "pg_loss": torch.where(c.mask, pg_loss.detach(), 0.0),
        "pg_clipfrac": (c.mask & clipped).to(ratio.dtype),
        "ppo_kl": torch.where(c.mask, (c.old_log_probs - c.log_probs).detach(), 0.0),
        "ratio": ratio.detach(),
    }
    if c.ref_log_probs is not None:
        metrics["kl_loss"] = kl.detach()
    return loss, metrics


def _policy_loss(ratio: Tensor, advantages: Tensor, terms: LossTerms) -> tuple[Tensor, Tensor]:
    """Returns each token's loss, and whether the token is clipped. Equal branches count as not clipped."""
    unclipped = -ratio * advantages
    bounded = -ratio.clamp(1 - terms.eps_clip, 1 + terms.eps_clip_high) * advantages
    clipped = bounded > unclipped
    loss = torch.where(clipped, bounded, unclipped)
    if terms.eps_clip_c is not None:
        ceiling = -terms.eps_clip_c * advantages
        loss = torch.where((advantages < 0) & (loss > ceiling), ceiling, loss)
    return loss, clipped
