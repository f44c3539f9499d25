"""Runs `rotary` by its Triton kernel. The gradient is the rotation in the opposite direction."""

from __future__ import annotations

from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from rl_kernel.autograd import Context
from rl_kernel.ops.rotary import kernels
from rl_kernel.telemetry import timed


class Rotary(Function):
    """Autograd function of `rotary`. Saves cos and sin only."""

    @staticmethod
    def forward(ctx: Context, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return kernels.rotate(x, cos, sin, back=False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, upstream: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        with timed("rotary", upstream.device):
            return kernels.rotate(upstream, cos, sin, back=True), None, None
