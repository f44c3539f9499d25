"""MXFP8: e4m3 codes in blocks of 32 along a row, with one power of two per block (OCP Microscaling Formats 1.0).

The scale is the smallest power of two with which the block's largest value fits e4m3. OCP's own rule rounds that
exponent down and cuts the values above 448 off; NVIDIA's recipe for pretraining (2506.08027) rounds up, as here.

Shapes: K elements of a row.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 32
BIAS = 127
"""A stored scale `s` means `2 ** (s - BIAS)`."""
MOST = 448.0
"""Largest number of float8_e4m3fn."""
_TINIEST = torch.finfo(torch.float32).tiny
_FRACTION = 2**23 - 1
_HALF_TINIEST = 2**22
"""Bits of 2 ** -127, the smallest scale."""


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """Maps x [..., K] to codes float8_e4m3fn [..., K] and scales uint8 [..., K / 32].

    `scale = 2 ** ceil(log2(max|x| / 448))`, computed from the bits of the float32 quotient, so it is the same on every
    device. A block of zeros has the smallest scale, 2 ** -127. Raises ValueError if K is no multiple of 32.
    """
    blocks = split_blocks(x, BLOCK, "MXFP8")
    largest = blocks.abs().amax(-1).clamp(min=_TINIEST)
    bits = (largest / largest.new_tensor(MOST)).view(torch.int32)
    exponents = (bits >> 23) + ((bits & _FRACTION) > 0) * (bits > _HALF_TINIEST)
    codes = (blocks / _powers(exponents)[..., None]).to(torch.float8_e4m3fn)
    return codes.flatten(-2), exponents.to(torch.uint8)


def dequantize(codes: Tensor, scales: Tensor) -> Tensor:
    """Maps the result of `quantize` to float32 [..., K]. The products are exact."""
    blocks = codes.float().unflatten(-1, (-1, BLOCK)) * _powers(scales.to(torch.int32))[..., None]
    values: Tensor = blocks.flatten(-2)
    return values


def rounded(x: Tensor) -> Tensor:
    """Returns `dequantize(*quantize(x))` in the dtype of x."""
    return dequantize(*quantize(x)).to(x.dtype)


def _powers(exponents: Tensor) -> Tensor:
    return torch.ldexp(torch.ones_like(exponents, dtype=torch.float32), exponents - BIAS)


def split_blocks(x: Tensor, size: int, form: str) -> Tensor:
    """Maps x [..., K] to float32 [..., K / size, size]. Raises ValueError if K is no multiple of `size`."""
    if x.dim() == 0 or x.shape[-1] % size:
        raise ValueError(
            f"x must have rows of whole blocks of {size} for {form}, got shape {list(x.shape)}; pad the rows"
        )
    blocks: Tensor = x.detach().float().unflatten(-1, (x.shape[-1] // size, size))
    return blocks
