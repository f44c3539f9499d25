"""Masked reductions in plain PyTorch: the definition of correct.

Sums are in float64. They are added over ranks in rank order, so that every rank gets the same bits.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from rl_kernel.collectives import rank_sum


def masked_total(values: Tensor, mask: Tensor, group: ProcessGroup | None) -> Tensor:
    """Returns [2] float64: sum and number of the counted values, over all ranks. `mask` is bool."""
    total = torch.where(mask, values, 0).sum(dtype=torch.float64)
    return rank_sum(torch.stack([total, mask.sum().double()]), group)


def masked_whiten_reference(
    values: Tensor, mask: Tensor, group: ProcessGroup | None, eps: float, shift_mean: bool
) -> Tensor:
    """Returns the whitened values, from `values` [...] float32 or float64 and a bool mask of the same shape."""
    total, count = masked_total(values, mask, group)
    mean = total / count.clamp(min=1)
    centred = torch.where(mask, values, 0).double() - mean
    spread, _ = masked_total(centred.square(), mask, group)
    variance = spread / (count - 1).clamp(min=1)
    white = centred * torch.rsqrt(variance + eps)
    if not shift_mean:
        white = white + mean
    return torch.where(mask, white, 0.0).to(values.dtype)
