"""Operators of a decoder layer whose result for a row does not depend on the other rows, on hosts in float32.

N rows, K inputs, M outputs, F half of the gated width, D head size.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from rl_kernel.invariant import exact
from rl_kernel.invariant.autograd import with_gradient_of


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`x @ weight.T + bias`: x [..., K], weight [M, K], bias [M] or None -> [..., M] in the dtype of x.

    Row i has the same bits whatever the other rows and their number, the threads and the library of products
    (`rl_kernel.invariant.exact.product`). Differentiable in all three.
    """

    def value(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        total = exact.product(x.reshape(-1, x.shape[-1]), weight)
        total = total if bias is None else total + bias.double()
        return total.to(x.dtype).view(*x.shape[:-1], len(weight))

    tensors = (x, weight) if bias is None else (x, weight, bias)
    return with_gradient_of(functional.linear, value, *tensors)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x / (x.square().mean(-1) + eps).sqrt() * weight`: x [..., K], weight [K] -> [..., K] in the dtype of x.

    In float64, rounded once. Differentiable in x and weight. Source: Zhang and Sennrich (2019).
    """

    def value(x: Tensor, weight: Tensor) -> Tensor:
        wide, scale = x.double(), exact.power_of_two(exact.exponents(x))
        share = wide / scale  # at most 1
        squares = exact.sum_of_fractions(share * share)[..., None]
        mean = squares * scale * scale / x.shape[-1]
        return (wide / (mean + eps).sqrt() * weight.double()).to(x.dtype)

    def plain(x: Tensor, weight: Tensor) -> Tensor:
        return functional.rms_norm(x, weight.shape, weight, eps)

    return with_gradient_of(plain, value, x, weight)


def swiglu(x: Tensor) -> Tensor:
    """`silu(gate) * up`: x [..., 2 F], gate beside up -> [..., F] in the dtype of x. Differentiable in x.

    In float64, rounded once. Source: Shazeer (2020).
    """

    def value(x: Tensor) -> Tensor:
        gate, up = x.double().chunk(2, dim=-1)
        return (gate / (1 + exact.exp(-gate)) * up).to(x.dtype)

    def plain(x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        return functional.silu(gate) * up

    return with_gradient_of(plain, value, x)


def angles(positions: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    """(cos, sin) of `positions.float()[:, None] * frequencies`: positions [N], frequencies [D / 2] -> fp32
    [N, 1, D / 2]. Constants."""
    turned = positions.float()[:, None, None] * frequencies.float()
    cos, sin = exact.cos_and_sin(turned.double())
    return cos.float(), sin.float()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), -1)` for the halves x1, x2 of the last dimension.

    x [N, heads, D], cos and sin [N, 1, D / 2] -> [N, heads, D] in the dtype of x. Each product and sum is rounded by
    itself. Differentiable in x. Source: Su et al. (2021).
    """
    x1, x2 = x.chunk(2, dim=-1)
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1)
