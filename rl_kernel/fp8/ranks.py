"""Products in fp8 whose sum is over ranks, and the unrounded product that they add.

Each rank has some of the inputs. Its groups of 128 inputs are those of a run on one rank, and the sums of the ranks are
added in their order, as in `rl_kernel.invariant.ranks`.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from rl_kernel.collectives import gather_stack
from rl_kernel.fp8.kept import rounded_for
from rl_kernel.fp8.layers import arithmetic_for
from rl_kernel.invariant.ranks import linear_over_ranks, own_rows


def multiply(x: Tensor, weight: Tensor, dtype: torch.dtype, *, power_of_two: bool = False) -> Tensor:
    """Computes `linear(x, weight, invariant=True)` without gradient, rounded to `dtype`: x [N, K], weight [M, K] -> [N,
    M]. float32 on a GPU and float64 on a host are the unrounded sum."""
    arithmetic = arithmetic_for(x.device)
    rounded, _ = rounded_for(
        weight, lambda turned: arithmetic.round_weights(weight[None], power_of_two, turned=turned)
    )
    found: Tensor = arithmetic.multiply(x, rounded, dtype, power_of_two)
    return found


def row_parallel_linear(
    x: Tensor, weight: Tensor, group: dist.ProcessGroup, *, scatter: bool = False, power_of_two: bool = False
) -> Tensor:
    """Computes `rl_kernel.invariant.row_parallel_linear` in fp8, with the gradients of `linear`: x [..., K], weight [M,
    K] -> [..., M] in the dtype of x. Collective, forward and backward."""
    rows = x.reshape(-1, x.shape[-1])
    out: Tensor = _RowParallel8.apply(rows, weight, group, scatter, power_of_two)
    return out.view(-1, *x.shape[1:-1], len(weight))


class _RowParallel8(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, group: dist.ProcessGroup, scatter: bool, power_of_two: bool
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.group, ctx.scatter, ctx.power_of_two = group, scatter, power_of_two
        gather = partial(own_rows if scatter else gather_stack, group=group)
        return linear_over_ranks(x, weight, gather, partial(multiply, power_of_two=power_of_two))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        if ctx.scatter:
            upstream = gather_stack(upstream, ctx.group).flatten(0, 1)
        arithmetic, powers = arithmetic_for(x.device), ctx.power_of_two
        rounded = arithmetic.round_upstream(upstream, None, powers)
        grad = grad_weight = None
        if needs_x:
            weights = arithmetic.round_weights(weight[None], powers, plain=False)
            grad = arithmetic.input_gradients(rounded, weights, None, powers)
        if needs_weight:
            grad_weight = arithmetic.weight_gradients(rounded, x, None, powers, weight.dtype)[0]
        return grad, grad_weight, None, None, None
