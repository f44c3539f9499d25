"""Ratios, means over the samples of a micro-batch, and the mask of samples that the policy has moved away from (OPSM).

R response tokens of a micro-batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rl_kernel.ops.ratio_kl.reference import MAX_EXPONENT


def ratio_of(log_ratio: Tensor) -> Tensor:
    """`log_ratio.exp()`. As in `rl_kernel.ratio_kl`, an exponent above 80 counts as 80: the ratio stays finite, and has
    no gradient there. An infinite ratio times a gradient of 0 would be NaN."""
    return log_ratio.clamp(max=MAX_EXPONENT).exp()


def weighted(values: Tensor, weights: Tensor) -> Tensor:
    """`values * weights`, and 0 where the weight is 0, whatever the value is there. Its gradient is 0 there, too."""
    return torch.where(weights != 0, values, 0.0) * weights


def sequence_mean(per_token: Tensor, mask: Tensor, sample_of_row: Tensor, num_samples: int) -> Tensor:
    """Masked mean of each sample, [num_samples]: `Σ_t x·m / max(Σ_t m, 1)`; differentiable."""
    weights = mask.to(per_token.dtype)
    total = per_token.new_zeros(num_samples).index_add(0, sample_of_row, weighted(per_token, weights))
    count = per_token.new_zeros(num_samples).index_add(0, sample_of_row, weights)
    return total / count.clamp(min=1)


def opsm_mask(
    advantages: Tensor, seq_kl: Tensor, sample_of_row: Tensor, *, delta: float
) -> tuple[Tensor, Tensor]:
    """Off-policy sequence mask: 0 for the tokens of a sample with negative advantage and sequence KL above `delta`.

    `seq_kl` [num_samples] is the masked mean of `old - new`. Returns the multiplier [R] and 1 - multiplier.
    """
    dropped = (advantages < 0) & (seq_kl.detach()[sample_of_row] > delta)
    keep = torch.where(dropped, 0.0, 1.0)
    return keep, 1.0 - keep
