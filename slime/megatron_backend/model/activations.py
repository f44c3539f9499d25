"""Activations between the two products of an MLP: [..., 2 F], gate and then up in each row, -> [..., F]. Without a
gate, [..., F] -> [..., F].

SiLU is `rl_kernel.swiglu`, which has a kernel. The other activations are plain PyTorch. Every activation keeps only its
input: the backward computes the forward again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import gelu

import rl_kernel
import rl_kernel.invariant as invariant

Gated = Callable[[Tensor], Tensor]


def swiglu(gate_and_up: Tensor) -> Tensor:
    """Returns `silu(gate) * up`."""
    return rl_kernel.swiglu(gate_and_up)


def _geglu(gate_and_up: Tensor) -> Tensor:
    """Returns `gelu(gate, approximate="tanh") * up`."""
    gate, up = gate_and_up.chunk(2, dim=-1)
    return gelu(gate, approximate="tanh") * up


def _clipped_swiglu(gate_and_up: Tensor) -> Tensor:
    """Returns `g * sigmoid(1.702 * g) * (u + 1)` with `g = gate.clamp(max=7)` and `u = up.clamp(-7, 7)` (gpt-oss)."""
    gate, up = gate_and_up.chunk(2, dim=-1)
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    return gate * torch.sigmoid(1.702 * gate) * (up + 1)


def _relu2(x: Tensor) -> Tensor:
    return x.relu().square()


class _KeepingInput(torch.autograd.Function):
    """Autograd function `make(x)` for a pure function `make`. It saves only `x`."""

    @staticmethod
    def forward(ctx: Any, make: Gated, x: Tensor) -> Tensor:
        ctx.make = make
        ctx.save_for_backward(x)
        return make(x)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[None, Tensor]:
        with torch.enable_grad():
            x = ctx.saved_tensors[0].detach().requires_grad_()
            made = ctx.make(x)
        return None, torch.autograd.grad(made, x, upstream)[0]


def geglu(gate_and_up: Tensor) -> Tensor:
    result: Tensor = _KeepingInput.apply(_geglu, gate_and_up)
    return result


def clipped_swiglu(gate_and_up: Tensor) -> Tensor:
    result: Tensor = _KeepingInput.apply(_clipped_swiglu, gate_and_up)
    return result


def weighted(gated: Gated, gate_and_up: Tensor, weights: Tensor) -> Tensor:
    """Returns `gated(gate_and_up) * weights[..., None]` in the dtype of `gate_and_up`. SiLU and the weights are one
    kernel."""
    if gated is swiglu:
        return rl_kernel.swiglu(gate_and_up, weights)
    if gated is invariant.swiglu:
        return invariant.swiglu(gate_and_up, weights)
    return (gated(gate_and_up) * weights[..., None]).to(gate_and_up.dtype)


def relu2(x: Tensor) -> Tensor:
    """Returns `relu(x) ** 2`, for a product without a gate (So et al. 2109.08668)."""
    result: Tensor = _KeepingInput.apply(_relu2, x)
    return result


ACTIVATIONS: dict[str, Gated] = {
    "swiglu": swiglu,
    "geglu": geglu,
    "clipped_swiglu": clipped_swiglu,
    "relu2": relu2,
}
"""Maps `Decoder.activation` to the function."""
