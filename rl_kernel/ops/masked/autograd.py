"""Runs the masked reductions by their Triton kernels. They have gradients on one process, but not over a group of
ranks."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from rl_kernel.autograd import Context
from rl_kernel.collectives import gather_stack, rank_sum
from rl_kernel.ops.masked import kernels
from rl_kernel.ops.masked.blocks import flat


class TotalContext(Context, Protocol):
    """Record of a call: shape and dtype of the values, and whether the result is their mean."""

    mean: bool
    shape: torch.Size
    dtype: torch.dtype


class _MaskedTotal(Function):
    """Autograd function of the sum or mean of the counted values. Saves the mask, the number of counted values and
    their sum."""

    @staticmethod
    def forward(ctx: TotalContext, values: Tensor, mask: Tensor, mean: bool) -> Tensor:
        mask = flat(mask)
        stats, result = kernels.moments(flat(values), mask, spread=False, mean=mean)
        ctx.save_for_backward(mask, stats)
        ctx.mean, ctx.shape, ctx.dtype = mean, values.shape, values.dtype
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: TotalContext, upstream: Tensor) -> tuple[Tensor, None, None]:
        mask, stats = ctx.saved_tensors
        grad = kernels.spread_grad(mask, stats, upstream, ctx.dtype, mean=ctx.mean)
        return grad.view(ctx.shape), None, None


class WhitenContext(Context, Protocol):
    """Record of a call. shape: shape of the values. terms: eps, and whether the mean is shifted to zero."""

    shape: torch.Size
    terms: tuple[float, bool]


class _Whiten(Function):
    """Autograd function of `masked_whiten`. Saves its inputs and their moments."""

    @staticmethod
    def forward(ctx: WhitenContext, values: Tensor, mask: Tensor, eps: float, shift_mean: bool) -> Tensor:
        ctx.shape, ctx.terms = values.shape, (eps, shift_mean)
        values, mask = flat(values), flat(mask)
        stats, _ = kernels.moments(values, mask, spread=True)
        ctx.save_for_backward(values, mask, stats)
        return kernels.whiten(values, mask, stats, eps, shift_mean).view(ctx.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: WhitenContext, d_out: Tensor) -> tuple[Tensor, None, None, None]:
        values, mask, stats = ctx.saved_tensors
        eps, shift_mean = ctx.terms
        grad = kernels.whiten_backward(values, mask, stats, eps, shift_mean, flat(d_out))
        return grad.view(ctx.shape), None, None, None


def masked_total_triton(values: Tensor, mask: Tensor, group: ProcessGroup | None, *, mean: bool) -> Tensor:
    """Returns the sum or mean, a float32 scalar."""
    if group is None:
        total_or_mean: Tensor = _MaskedTotal.apply(values, mask, mean)
        return total_or_mean
    stats, _ = kernels.moments(flat(values), flat(mask), spread=False)
    number, total = rank_sum(stats, group).unbind()
    return (total / number.clamp(min=1) if mean else total).float()


def masked_whiten_triton(
    values: Tensor, mask: Tensor, group: ProcessGroup | None, eps: float, shift_mean: bool
) -> Tensor:
    """Returns the whitened values, float32, with the shape of `values`."""
    if group is None:
        white: Tensor = _Whiten.apply(values, mask, eps, shift_mean)
        return white
    entries, counted = flat(values), flat(mask)
    stats, _ = kernels.moments(entries, counted, spread=True)
    merged = merge_moments(gather_stack(stats, group))
    return kernels.whiten(entries, counted, merged, eps, shift_mean).view(values.shape)


def merge_moments(parts: Tensor) -> Tensor:
    """Returns the moments [3] over all ranks' entries, from each rank's moments [P, 3]: number, sum, and sum of
    squared distances from the mean."""
    number, total, spread = parts.unbind(1)
    mean = total.sum() / number.sum().clamp(min=1)
    distance = total / number.clamp(min=1) - mean
    return torch.stack([number.sum(), total.sum(), (spread + number * distance.square()).sum()])
