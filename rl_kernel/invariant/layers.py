"""Operators of a decoder layer whose result for a row does not depend on the other rows.

A host computes in float32, exactly (`rl_kernel.invariant.exact`). A GPU runs Triton kernels with float32 sums.

N rows, K inputs, M outputs, F half of the gated width, D head size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from rl_kernel.invariant import exact
from rl_kernel.invariant.autograd import with_plain_gradient
from rl_kernel.ops.rotary.reference import rotary_reference


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Returns `x @ weight.T + bias`: x [..., K], weight [M, K], bias [M] or None -> [..., M] in the dtype of x.

    Row i has the same bits for any number and content of the other rows. On a host the threads and the library of
    matrix products change nothing either (`rl_kernel.invariant.exact.product`). Differentiable in x, weight and bias;
    the gradients are plain products, deterministic for one shape.
    """
    rows = x.reshape(-1, x.shape[-1])
    out: Tensor = (
        _Linear.apply(rows, weight, bias) if torch.is_grad_enabled() else product(rows, weight, bias)
    )
    return out.view(*x.shape[:-1], len(weight))


def product(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, dtype: torch.dtype | None = None
) -> Tensor:
    """Returns `linear` of x [N, K] without gradient, rounded to `dtype` (default: the dtype of x). float32 on a GPU and
    float64 on a host are the unrounded sum."""
    dtype = x.dtype if dtype is None else dtype
    if x.is_cuda:
        from rl_kernel.invariant import kernels

        return kernels.linear(x, weight, bias, dtype=dtype)
    total = exact.product(x, weight)
    return (total if bias is None else total + bias.double()).to(dtype)


Multiply = Callable[[Tensor, Tensor, torch.dtype], Tensor]
"""Maps x [N, K], a weight [M, K] and the dtype of the result to [N, M]."""


def plain_product(x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Computes `product` as a `Multiply`."""
    return product(x, weight, dtype=dtype)


def unrounded(x: Tensor) -> torch.dtype:
    """Returns the dtype of unrounded sums on the device of x."""
    return torch.float32 if x.is_cuda else torch.float64


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return product(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        return (
            upstream @ weight if needs_x else None,
            upstream.T @ x if needs_weight else None,
            upstream.sum(0) if needs_bias else None,
        )


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Returns `x / (x.square().mean(-1) + eps).sqrt() * weight`: x [..., K], weight [K] -> [..., K] in the dtype of x.

    A host computes in float64 and rounds once. Differentiable in x and weight. Source: Zhang and Sennrich (2019).
    """

    def value(x: Tensor, weight: Tensor) -> Tensor:
        if x.is_cuda:
            from rl_kernel.invariant import kernels

            rows = x if x.dim() <= 3 else x.reshape(-1, *x.shape[-2:])
            return kernels.rms_norm(rows, weight, eps)[0].view(x.shape)
        wide, scale = x.double(), exact.power_of_two(exact.exponents(x))
        share = wide / scale  # at most 1
        squares = exact.sum_fractions(share * share)[..., None]
        mean = squares * scale * scale / x.shape[-1]
        return (wide / (mean + eps).sqrt() * weight.double()).to(x.dtype)

    def plain(x: Tensor, weight: Tensor) -> Tensor:
        return functional.rms_norm(x, weight.shape, weight, eps)

    return with_plain_gradient(plain, value, x, weight)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Returns `(rms_norm(x + residual, weight, eps), x + residual)`, with the same bits, in one kernel on a GPU. x and
    residual [N, K], weight [K]. Without a gradient."""
    if x.is_cuda:
        from rl_kernel.invariant import kernels

        return kernels.rms_norm(x, weight, eps, residual)
    total = x + residual
    return rms_norm(total, weight, eps), total


def swiglu(x: Tensor, weights: Tensor | None = None) -> Tensor:
    """Returns `silu(gate) * up`, times each row's weight if `weights` is given: x [..., 2 F] holds gate, then up, in
    each row, weights [...] -> [..., F] in the dtype of x. Differentiable in both.

    A host computes the activation in float64 and rounds it, and then rounds its product with the weight. A GPU runs
    the kernel of `rl_kernel.swiglu`, which rounds once. Source: Shazeer (2020).
    """
    if x.is_cuda:
        from rl_kernel.ops.swiglu.autograd import Swiglu

        fused: Tensor = Swiglu.apply(x, weights)
        return fused

    def value(x: Tensor) -> Tensor:
        gate, up = x.double().chunk(2, dim=-1)
        return (gate / (1 + exact.exp(-gate)) * up).to(x.dtype)

    def plain(x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        return functional.silu(gate) * up

    out = with_plain_gradient(plain, value, x)
    return out if weights is None else (out * weights[..., None]).to(x.dtype)


def angles(positions: Tensor, frequencies: Tensor, amplitude: float = 1.0) -> tuple[Tensor, Tensor]:
    """Returns `amplitude` times (cos, sin) of `positions.float()[:, None] * frequencies`: positions [N], frequencies
    [D / 2] -> fp32 [N, 1, D / 2]. The results are constants. Every device computes in float64."""
    turned = positions.float()[:, None, None] * frequencies.float()
    cos, sin = exact.cos_and_sin(turned.double())
    return (cos * amplitude).float(), (sin * amplitude).float()


def rotate(x: Tensor, angles: Tensor, positions: Tensor) -> Tensor:
    """Returns `cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), -1)` for the halves x1, x2 of the last dimension, with
    `cos, sin = angles[:, positions]`. Without a gradient.

    x [N, heads, D], angles [2, P, 1, D / 2] fp32, positions [N] -> [N, heads, D] in the dtype of x. The bits are those
    of `rl_kernel.rotary`: a host rounds each product and each sum separately, and on a GPU the kernel of
    `rl_kernel.rotary` reads the table. Source: Su et al. (2021).
    """
    if not x.is_cuda:
        return rotary_reference(x, *angles[:, positions])
    from rl_kernel.ops.rotary import kernels

    return kernels.rotate(x, *angles, back=False, positions=positions)
