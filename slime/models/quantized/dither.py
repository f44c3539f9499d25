"""Spreads the values of a quantised weight over their rounding intervals.

A dequantised weight is at the centre of a rounding interval, so a small update does not change its code, and engines
that quantise each update keep the old value. Dithering (Roberts, 1962) moves each value to a pseudo-random position in
its interval. The weight then rounds to the same codes and scales, and small updates change codes in proportion to their
size.

Shapes: O outputs, I inputs of a weight. torch is imported only to compute.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from zlib import crc32

from slime.models.quantized.int4 import fit_groups
from slime.models.quantized.quantization import (
    FP8_MOST,
    QuantizationScheme,
    block_maxima,
    scales_from,
    spread,
    to_fp8,
)

if TYPE_CHECKING:
    from torch import Tensor, dtype

_FACTORS = 0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9
"""Odd multipliers of the hash."""
_DRAWS, _CORRECTIONS = 8, 4


def dither(
    weight: Tensor,
    scheme: QuantizationScheme,
    scale_dtype: dtype,
    name: str,
    corner: tuple[int, int],
    width: int,
) -> Tensor:
    """Returns bfloat16 [O, I] that `quantize` rounds to the codes and scales of `weight`, which is the dequantised
    weight of whole blocks.

    `corner` is the row and the column of the first element in the weight `name`, and `width` is the weight's number of
    columns. The position in an interval depends on them only, so that ranks with other slices get the same values. A
    block's largest value stays, because it decides the scale, and so do zeros. In INT4, a group whose codes or scale
    would change stays.
    """
    position = _positions(tuple(weight.shape), name, corner, width, weight)
    if scheme.kind == "int4":
        return _dither_int4(weight, scheme.block[1], scale_dtype, position)
    return _dither_fp8(weight, scheme, scale_dtype, position)


def _positions(
    shape: tuple[int, ...], name: str, corner: tuple[int, int], width: int, like: Tensor
) -> Tensor:
    """Returns fp32 numbers in [0, 1): a hash of the name and of the element's index in the weight."""
    import torch

    rows, columns = (
        torch.arange(first, first + size, device=like.device)
        for first, size in zip(corner, shape, strict=True)
    )
    mixed = (rows[:, None] * width + columns + 1) * _FACTORS[0] + crc32(name.encode())
    mixed = (mixed ^ (mixed >> 31)) * _FACTORS[1]
    return ((mixed >> 24) & 0xFFFFFF).float() / 2**24


def _dither_fp8(weight: Tensor, scheme: QuantizationScheme, kind: dtype, position: Tensor) -> Tensor:
    import torch

    shape = tuple(weight.shape)
    maxima = block_maxima(weight, scheme)
    scales = scales_from(maxima, scheme).to(kind)
    codes = to_fp8(weight, scales, scheme)
    block = scheme.block[0] or shape[0], scheme.block[1] or shape[1]
    each, most = spread(scales, block, shape), spread(maxima, block, shape)
    bits = codes.view(torch.uint8)
    size, above, below = (
        (bits & 0x7F).add(step).clamp(0, 0x7E).view(torch.float8_e4m3fn).float() for step in (0, 1, -1)
    )
    ends = [
        _inside(torch.copysign(end * each, weight.float()).to(torch.bfloat16), inward, scales, scheme, bits)
        for end, inward in (((size + below) / 2, 1), (((size + above) / 2).clamp(max=FP8_MOST), -1))
    ]
    # uniform over the numbers that round to the first bfloat16 value, to the last one, or to those in between
    first, last = ((x.float() + _step(x, away).float()) / 2 for x, away in zip(ends, (-1, 1), strict=True))
    moved = (first + position * (last - first)).to(torch.bfloat16)
    moved = torch.where(
        moved.abs() < ends[0].abs(), ends[0], torch.where(moved.abs() > ends[1].abs(), ends[1], moved)
    )
    stays = (weight.abs().float() == most) | (size == 0) | (moved.abs().float() > most)
    return torch.where(stays, weight, moved)


def _inside(end: Tensor, inward: int, scales: Tensor, scheme: QuantizationScheme, bits: Tensor) -> Tensor:
    """Returns `end`, or the next bfloat16 value to the centre of the interval if `end` rounds to another code."""
    import torch

    return torch.where(to_fp8(end, scales, scheme).view(torch.uint8) == bits, end, _step(end, inward))


def _step(x: Tensor, by: int) -> Tensor:
    """Returns the bfloat16 values that are `by` steps further from zero."""
    import torch

    return (x.view(torch.int16) + by).view(torch.bfloat16)


def _dither_int4(weight: Tensor, group: int, kind: dtype, position: Tensor) -> Tensor:
    """Draws the changes of a group again, up to `_DRAWS` times, until it keeps its codes and its scale.

    A scale is the projection of the weights on the codes, so the part of the changes along the codes is removed. A
    group's codes change if those of the other range (`fit_groups`) then have a smaller error.
    """
    import torch

    codes, scales = fit_groups(weight, group, kind)
    rows, along = weight.reshape(-1, group).clone(), codes.reshape(-1, group).float()
    position, left = position.reshape(-1, group), torch.arange(len(rows), device=weight.device)
    steps, free = scales.reshape(-1, 1), (along != 0) & (rows.abs() != rows.abs().amax(-1, keepdim=True))
    squares = along.square().sum(-1, keepdim=True).clamp(min=1)
    for _ in range(_DRAWS):
        change = position[left] - 0.5
        for _ in range(_CORRECTIONS):
            shift = (change * free[left] * along[left]).sum(-1, keepdim=True) / squares[left]
            change = change - shift * along[left]
            change = torch.where(change.abs() > 0.5, torch.copysign(1 - change.abs(), change), change)
        change = torch.where(free[left], change * steps[left].float(), 0)
        moved = (rows[left].float() + change).to(torch.bfloat16)
        new_codes, new_scales = fit_groups(moved, group, kind)
        same = (new_codes == along[left]).all(-1) & (new_scales == steps[left])[:, 0]
        rows[left[same]] = moved[same]
        left = left[~same]
        position = (position * 2**12 + position) % 1  # the hash has 24 bits: other bits come first
    return rows.view(weight.shape)
