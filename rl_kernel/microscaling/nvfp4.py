"""NVFP4: e2m1 codes in blocks of 16 along a row, an e4m3 scale per block and a float32 scale per tensor
(2509.25149, appendix on the format).

Shapes: K elements of a row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rl_kernel.microscaling.mxfp8 import split_blocks

BLOCK = 16
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Values of the codes 0 to 7. Codes 8 to 15 are the same values with a minus sign."""
MOST = 6.0
MOST_SCALE = 448.0
"""Largest number of float8_e4m3fn."""


def fit_global_scale(x: Tensor) -> Tensor:
    """Returns the float32 scale of a tensor as checkpoints store it, `448 * 6 / max|x|`, or 1 for zeros."""
    largest = x.detach().abs().amax().float()
    return torch.where(largest > 0, MOST_SCALE * MOST / largest, torch.ones_like(largest))


def quantize(x: Tensor, global_scale: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Maps x [..., K] to codes uint8 [..., K / 2] (the lower four bits are the earlier code), scales float8_e4m3fn
    [..., K / 16] and the tensor's float32 scale, by default `fit_global_scale(x)`.

    A code means `code * scale / global_scale`. The scale of a block is `max|x| / 6 * global_scale` rounded to e4m3, and
    a code is the nearest number of e2m1, ties to the even code. Raises ValueError if K is no multiple of 16.
    """
    whole = fit_global_scale(x) if global_scale is None else global_scale.float()
    blocks = split_blocks(x, BLOCK, "NVFP4")
    scales = (whole * (blocks.abs().amax(-1) * (1 / MOST))).clamp(max=MOST_SCALE).to(torch.float8_e4m3fn)
    # the order of vLLM's kernels: a code is the nearest to a product with a reciprocal, not to a quotient
    steps = scales.float() * whole.reciprocal()
    each = torch.where(steps > 0, steps, torch.ones_like(steps)).reciprocal()
    return _pack(_find_codes(blocks * each[..., None]).flatten(-2)), scales, whole


def dequantize(codes: Tensor, scales: Tensor, global_scale: Tensor) -> Tensor:
    """Maps the result of `quantize` to float32 [..., K]."""
    nibbles = torch.stack([codes & 15, codes >> 4], dim=-1).flatten(-2)
    values = torch.tensor([*VALUES, *(-value for value in VALUES)], device=codes.device)[nibbles.long()]
    blocks = values.unflatten(-1, (-1, BLOCK)) * (scales.float() / global_scale)[..., None]
    found: Tensor = blocks.flatten(-2)
    return found


def rounded(x: Tensor, global_scale: Tensor | None = None) -> Tensor:
    """Returns `dequantize(*quantize(x, global_scale))` in the dtype of x."""
    return dequantize(*quantize(x, global_scale)).to(x.dtype)


def _find_codes(values: Tensor) -> Tensor:
    """Returns the codes uint8 of the nearest values of e2m1."""
    table = torch.tensor(VALUES, device=values.device)
    middles = (table[1:] + table[:-1]) / 2
    size = values.abs()
    # a value on a middle goes to the code below it, or to the code above it if that code is even
    below, above = torch.bucketize(size, middles), torch.bucketize(size, middles, right=True)
    codes = torch.where(above % 2 == 0, above, below)
    return (codes + 8 * (values.signbit() & (codes > 0))).to(torch.uint8)


def _pack(codes: Tensor) -> Tensor:
    pairs: Tensor = codes.unflatten(-1, (-1, 2))
    return pairs[..., 0] | pairs[..., 1] << 4
