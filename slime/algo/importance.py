"""Ratios, means over the samples of a micro-batch, and the off-policy sequence mask (OPSM).

A micro-batch has R response tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rl_kernel.ops.ratio_kl.reference import MAX_EXPONENT


def compute_ratio(log_ratio: Tensor) -> Tensor:
    """Returns `log_ratio.exp()`. As in `rl_kernel.ratio_kl`, an exponent above 80 counts as 80. The ratio is then
    finite and without a gradient, because an infinite ratio times a gradient of 0 would be NaN."""
    return log_ratio.clamp(max=MAX_EXPONENT).exp()


def weighted(values: Tensor, weights: Tensor) -> Tensor:
    """Returns `values * weights`, and 0 where the weight is 0, even if the value is infinite or NaN. The gradient is 0
    there, too."""
    return torch.where(weights != 0, values, 0.0) * weights


def sequence_mean(per_token: Tensor, mask: Tensor, sample_of_row: Tensor, num_samples: int) -> Tensor:
    """Returns each sample's masked mean, `Σ_t x·m / max(Σ_t m, 1)`, as [num_samples]. Differentiable."""
    weights = mask.to(per_token.dtype)
    total = per_token.new_zeros(num_samples).index_add(0, sample_of_row, weighted(per_token, weights))
    count = per_token.new_zeros(num_samples).index_add(0, sample_of_row, weights)
    return total / count.clamp(min=1)


def opsm_mask(
    advantages: Tensor, seq_kl: Tensor, sample_of_row: Tensor, *, delta: float
) -> tuple[Tensor, Tensor]:
    """Returns the off-policy sequence mask [R], and 1 - mask. The mask is 0 for each token with a negative advantage
    whose sample has a KL above `delta`, else 1.

    `seq_kl` [num_samples] is the masked mean of `old - new`.
    """
    dropped = (advantages < 0) & (seq_kl.detach()[sample_of_row] > delta)
    keep = torch.where(dropped, 0.0, 1.0)
    return keep, 1.0 - keep
