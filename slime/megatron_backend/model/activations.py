"""Gated activations between the two products of an MLP: [..., 2 F], gate beside up, -> [..., F].

SiLU is `rl_kernel.swiglu`, which has a kernel. The others are plain PyTorch. Each keeps its input only: the backward
computes the forward again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import gelu

import rl_kernel

Gated = Callable[[Tensor], Tensor]


def swiglu(gate_and_up: Tensor) -> Tensor:
    """`silu(gate) * up`."""
    return rl_kernel.swiglu(gate_and_up)


def _geglu(gate_and_up: Tensor) -> Tensor:
    """`gelu(gate, approximate="tanh") * up`."""
    gate, up = gate_and_up.chunk(2, dim=-1)
    return gelu(gate, approximate="tanh") * up


def _clipped_swiglu(gate_and_up: Tensor) -> Tensor:
    """`g * sigmoid(1.702 * g) * (u + 1)` with `g = gate.clamp(max=7)` and `u = up.clamp(-7, 7)` (gpt-oss)."""
    gate, up = gate_and_up.chunk(2, dim=-1)
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    return gate * torch.sigmoid(1.702 * gate) * (up + 1)


class _KeepingInput(torch.autograd.Function):
    """`make(x)` for a pure function `make`. Autograd keeps `x` only."""

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
    """`gated(gate_and_up) * weights[..., None]` in the dtype of `gate_and_up`. SiLU is one kernel with the weights."""
    if gated is swiglu:
        return rl_kernel.swiglu(gate_and_up, weights)
    return (gated(gate_and_up) * weights[..., None]).to(gate_and_up.dtype)


ACTIVATIONS: dict[str, Gated] = {
    "swiglu": swiglu,
    "geglu": geglu,
    "clipped_swiglu": clipped_swiglu,
}
"""`Decoder.activation` -> the function."""
