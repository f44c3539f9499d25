"""`swiglu` by its Triton kernels, with its gradient."""

from __future__ import annotations

from math import prod

from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from rl_kernel.autograd import Context
from rl_kernel.ops.swiglu import kernels
from rl_kernel.telemetry import timed


class Swiglu(Function):
    """Saves its input only. The backward computes the sigmoid again."""

    @staticmethod
    def forward(ctx: Context, x: Tensor) -> Tensor:
        # All sizes are given: torch cannot infer a -1 for a tensor without elements.
        rows = x.reshape(prod(x.shape[:-1]), x.shape[-1])
        ctx.save_for_backward(rows)
        return kernels.forward(rows).view(*x.shape[:-1], x.shape[-1] // 2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, upstream: Tensor) -> Tensor:
        (rows,) = ctx.saved_tensors
        with timed("swiglu", rows.device):
            grad = kernels.backward(rows, upstream.reshape(len(rows), upstream.shape[-1]))
        return grad.view(*upstream.shape[:-1], rows.shape[-1])
