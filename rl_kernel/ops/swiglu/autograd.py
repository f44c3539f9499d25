"""Runs `swiglu` by its Triton kernels, with its gradient."""

from __future__ import annotations

from math import prod

from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from rl_kernel.autograd import Context
from rl_kernel.ops.swiglu import kernels
from rl_kernel.telemetry import timed


class Swiglu(Function):
    """Autograd function of `swiglu`. Saves its inputs only; the backward computes the sigmoid again."""

    @staticmethod
    def forward(ctx: Context, x: Tensor, weights: Tensor | None) -> Tensor:
        # All sizes are given: torch cannot infer a -1 for a tensor without elements.
        rows = x.reshape(prod(x.shape[:-1]), x.shape[-1])
        factors = None if weights is None else weights.reshape(len(rows))
        ctx.save_for_backward(rows, factors)
        return kernels.forward(rows, factors).view(*x.shape[:-1], x.shape[-1] // 2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, upstream: Tensor) -> tuple[Tensor, Tensor | None]:
        rows, factors = ctx.saved_tensors
        shape = upstream.shape[:-1]
        with timed("swiglu", rows.device):
            grad_rows = upstream.reshape(len(rows), upstream.shape[-1])
            if factors is None:
                return kernels.backward(rows, grad_rows).view(*shape, rows.shape[-1]), None
            grad, grad_factors = kernels.weighted_backward(rows, factors, grad_rows)
        return grad.view(*shape, rows.shape[-1]), grad_factors.view(shape)
