"""Matrix products over tensor-parallel ranks, with the same bits in an engine and a trainer with the same number of
ranks.

Column parallel: each rank has some outputs, so that no sum over ranks is needed. Row parallel: each rank has some of
the inputs. Its products are gathered unrounded (float32 on a GPU, float64 on a host), added in rank order, and rounded
once. An all-reduce would leave the order to the library.

R ranks, N rows, K inputs of this rank, M outputs of this rank.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rl_kernel.collectives import gather_stack
from rl_kernel.invariant.layers import Multiply, plain_product, product, unrounded

Context = Any
"""Torch's record of a call. This module sets its attributes, which have no types."""
Gather = Callable[[Tensor], Tensor]
"""Maps this rank's [N, M] to [R, n, M]: the n rows that this rank needs, from all ranks in rank order. Collective."""


def linear_over_ranks(
    x: Tensor, weight: Tensor, gather: Gather, multiply: Multiply = plain_product
) -> Tensor:
    """Returns `sum(x_r @ weight_r.T for r in ranks)`: x [N, K], weight [M, K] -> [n, M] in the dtype of x, for the n
    rows that `gather` returns. `multiply` is the product. Without gradient.

    The sum has the bits of (((p_0 + p_1) + p_2) + ...) of unrounded products, rounded once. `gather` must move bits
    unchanged.
    """
    parts = gather(multiply(x, weight, unrounded(x)))
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total.to(x.dtype)


def row_parallel_linear(
    x: Tensor, weight: Tensor, group: dist.ProcessGroup, *, scatter: bool = False
) -> Tensor:
    """Computes `linear_over_ranks` over `group`, with gradients: x [..., K], weight [M, K] -> [..., M] in the dtype of
    x, on every rank.

    `scatter`: each rank gets its part of the first dimension, which must be divisible by the number of ranks. The
    gradient is that of the plain product and of an all-reduce or a reduce-scatter. Collective, forward and backward.
    """
    out: Tensor = _RowParallel.apply(x.reshape(-1, x.shape[-1]), weight, group, scatter)
    return out.view(-1, *x.shape[1:-1], len(weight))


def column_parallel_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, group: dist.ProcessGroup, *, gather: bool = False
) -> Tensor:
    """Computes `rl_kernel.invariant.linear` for this rank's outputs: x [..., K] equal on all ranks, weight [M, K] ->
    [..., M].

    `gather`: x is this rank's part of the first dimension. The gradient of x is the sum over `group`. Collective.
    """
    out: Tensor = _ColumnParallel.apply(x.reshape(-1, x.shape[-1]), weight, bias, group, gather)
    return out.view(-1, *x.shape[1:-1], len(weight))


class _RowParallel(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, x: Tensor, weight: Tensor, group: dist.ProcessGroup, scatter: bool) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.group, ctx.scatter = group, scatter
        return linear_over_ranks(x, weight, partial(own_rows if scatter else gather_stack, group=group))

    @staticmethod
    def backward(ctx: Context, upstream: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        if ctx.scatter:
            upstream = gather_stack(upstream, ctx.group).flatten(0, 1)
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        return upstream @ weight if needs_x else None, upstream.T @ x if needs_weight else None, None, None


class _ColumnParallel(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Context, x: Tensor, weight: Tensor, bias: Tensor | None, group: dist.ProcessGroup, gather: bool
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.group, ctx.gather = group, gather
        if gather:
            x = gather_stack(x, group).flatten(0, 1)
        return product(x, weight, bias)

    @staticmethod
    def backward(ctx: Context, upstream: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        # the sum over ranks overlaps with the product for the weight
        grad, added = start_sum(upstream @ weight, ctx.group, scatter=ctx.gather) if needs_x else (None, None)
        grad_weight = None
        if needs_weight:
            if ctx.gather:  # gather again, so that only this rank's rows are kept from forward to backward
                x = gather_stack(x, ctx.group).flatten(0, 1)
            grad_weight = upstream.T @ x
        if added is not None:
            added.wait()
        return grad, grad_weight, upstream.sum(0) if needs_bias else None, None, None


def start_sum(grad: Tensor, group: dist.ProcessGroup, *, scatter: bool) -> tuple[Tensor, dist.Work | None]:
    """Starts the sum over ranks. Returns its tensor (this rank's rows if `scatter`) and the work to wait for before
    reading it."""
    if not scatter:
        return grad, dist.all_reduce(grad, group=group, async_op=True)
    mine = grad.new_empty(len(grad) // group.size(), *grad.shape[1:])
    return mine, dist.reduce_scatter_tensor(mine, grad, group=group, async_op=True)


def own_rows(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Exchanges [N, M] of each rank into [R, N / R, M]: the rows of this rank's part, from all ranks in rank order.
    Collective.

    Raises ValueError if N is not a multiple of R.
    """
    ranks = group.size()
    if len(x) % ranks:
        raise ValueError(f"rows must be a multiple of the {ranks} ranks to be scattered, got {len(x)}; pad x")
    x = x.contiguous()
    out = torch.empty_like(x)
    dist.all_to_all_single(out, x, group=group)
    return out.view(ranks, -1, *x.shape[1:])
