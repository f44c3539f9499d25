"""Runs `expert_dispatch` and `expert_combine` by their Triton kernels. The
gradient of either operator is the other operator's forward."""

from __future__ import annotations

from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from rl_kernel.autograd import Context
from rl_kernel.ops.expert_rows import kernels
from rl_kernel.telemetry import timed


class _CombineContext(Context):
    total: int


class Dispatch(Function):
    """Autograd function of `expert_dispatch`. It saves the rows only."""

    @staticmethod
    def forward(ctx: Context, x: Tensor, weights: Tensor, rows: Tensor, total: int) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(rows)
        return kernels.spread(x, weights, rows, total)

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, d_out: Tensor, d_weights: Tensor) -> tuple[Tensor, Tensor, None, None]:
        (rows,) = ctx.saved_tensors
        with timed("expert_dispatch", d_out.device):
            return *kernels.gather_sum(d_out, d_weights, rows), None, None


class Combine(Function):
    """Autograd function of `expert_combine`. It saves the rows only."""

    @staticmethod
    def forward(ctx: _CombineContext, y: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.total = len(y)
        return kernels.gather_sum(y, None, rows)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: _CombineContext, upstream: Tensor) -> tuple[Tensor, None]:
        (rows,) = ctx.saved_tensors
        with timed("expert_combine", upstream.device):
            return kernels.spread(upstream, None, rows, ctx.total)[0], None
