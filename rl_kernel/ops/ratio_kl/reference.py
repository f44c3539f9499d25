"""`ratio_kl` in plain PyTorch: the definition of correct. Autograd computes its gradient."""

from __future__ import annotations

import torch
from torch import Tensor

MAX_EXPONENT = 80.0
"""Largest exponent: exp(89) overflows float32, and infinity times a zero gradient is NaN."""
LOW_VAR_BOUND = 10.0


def ratio_kl_reference(
    log_probs: Tensor,
    old_log_probs: Tensor,
    ref_log_probs: Tensor | None,
    mask: Tensor | None,
    kl_type: str,
    unbiased: bool,
) -> tuple[Tensor, Tensor]:
    """Returns (ratio, kl) from inputs [N] of one dtype, float32 or float64, and a bool mask [N]."""
    log_ratio = _difference(log_probs, old_log_probs, mask)
    ratio = log_ratio.clamp(max=MAX_EXPONENT).exp()
    if ref_log_probs is None:
        return ratio, torch.zeros_like(log_ratio)
    to_ref = _difference(log_probs, ref_log_probs, mask)
    if unbiased:  # a ratio of 0 times an infinite estimate is 0, not NaN
        to_ref = torch.where(ratio == 0, 0.0, to_ref)
    kl = approx_kl(to_ref, kl_type)
    if unbiased:
        kl = ratio * kl
    if kl_type == "low_var_kl":
        kl = kl.clamp(-LOW_VAR_BOUND, LOW_VAR_BOUND)
    return ratio, kl


def approx_kl(log_ratio: Tensor, kl_type: str) -> Tensor:
    """Returns the estimate of KL(policy || base) for a log-ratio `log_probs - base`, before weight and clamp."""
    if kl_type == "k1":
        return log_ratio
    if kl_type == "k2":
        return log_ratio.square() / 2
    # Almost all tokens are near x = 0, where exp(x) - 1 loses digits that expm1 keeps. Both terms have the same bound,
    # so that the estimate stays at least 0 where the policy's probability is 0.
    x = (-log_ratio).clamp(max=MAX_EXPONENT)
    return torch.expm1(x) - x


def _difference(log_probs: Tensor, base: Tensor, mask: Tensor | None) -> Tensor:
    """Returns log_probs - base, and 0 for tokens that are masked out, so that their inputs affect neither values nor
    gradients."""
    difference = log_probs - base
    return difference if mask is None else torch.where(mask, difference, 0.0)
