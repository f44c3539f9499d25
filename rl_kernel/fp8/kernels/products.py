"""The products of rounded matrices in Triton, for one weight or for the weights of experts.

Each step multiplies 128 x 128 codes on the tensor cores, and adds the result, times the scales, to a float32 sum. The
tile does not depend on the shape, so a row of the result has the same bits for any number of other rows.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from rl_kernel.fp8.kernels.quantize import Operand, RowGroups
from rl_kernel.fp8.reference import GROUP


@dataclass(frozen=True)
class Launch:
    """The launch settings of a product's kernel. `stages` is the number of steps that are read ahead. None means as
    many steps as fit on the GPU. `registers` is the limit per thread."""

    warps: int = 8
    stages: int | None = None
    registers: int | None = None


DEFAULT = Launch()
TOGETHER = 16
"""Number of tiles of rows that are computed before the next columns, so that the weight's tiles stay in the cache."""


@triton.jit(do_not_specialize=["M", "a_stride", "tall"])
def rows_kernel(
    A, A_SCALES, B, B_SCALES, OUT, EXPERT, FIRST, LAST, M, N, K, a_stride, b_stride, tall,
    TOGETHER: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Computes a tile of A @ B[expert].T. A has a scale per row and 128 columns, B per 128 x 128 elements."""
    part, broad = tl.program_id(0), N // SIZE
    group = part // (TOGETHER * broad)
    height = min(tall - group * TOGETHER, TOGETHER)
    tile = group * TOGETHER + part % (TOGETHER * broad) % height
    block = part % (TOGETHER * broad) // height
    lane = tl.arange(0, SIZE)
    if EXPERT is None:
        first, last, weight = tile * SIZE, M, 0
    else:
        first, last, weight = tl.load(FIRST + tile), tl.load(LAST + tile), tl.load(EXPERT + tile)
    if first < last:
        row = (first + lane).to(tl.int64)
        inside = row < last
        b_scales = B_SCALES + (weight * broad + block) * b_stride
        total = tl.zeros((SIZE, SIZE), tl.float32)
        scale = tl.load(A_SCALES + row, inside, other=0.0) * tl.load(b_scales)
        for step in range(0, K // SIZE):
            a = A.load([first, step * SIZE])
            b = B.load([(weight * broad + block) * SIZE, step * SIZE])
            # the product does not wait for the scales of the next step
            following = min(step + 1, K // SIZE - 1)
            next_scale = tl.load(A_SCALES + tl.cast(following, tl.int64) * a_stride + row, inside, other=0.0)
            next_scale *= tl.load(b_scales + following)
            total += tl.dot(a, b.T) * scale[:, None]
            scale = next_scale
        column = block * SIZE + lane
        tl.store(OUT + row[:, None] * N + column[None, :], total.to(OUT.dtype.element_ty), inside[:, None])


@triton.jit(do_not_specialize=["groups"])
def columns_kernel(
    A, A_SCALES, B, B_SCALES, OUT, TOTALS, STARTS, N, K, groups, TOGETHER: tl.constexpr, SIZE: tl.constexpr
):
    """Computes a tile of A @ B.T over the groups of an expert. Both have a scale per row and 128 columns. Writes the
    tile to OUT, or adds the tile to the expert's float32 matrix, whose address is in TOTALS."""
    part, tall, broad = tl.program_id(0), N // SIZE, K // SIZE
    group = part // (TOGETHER * broad)
    height = min(tall - group * TOGETHER, TOGETHER)
    above = group * TOGETHER + part % (TOGETHER * broad) % height
    left = part % (TOGETHER * broad) // height
    expert = tl.program_id(1).to(tl.int64)
    lane = tl.arange(0, SIZE)
    row, column = above * SIZE + lane, left * SIZE + lane
    if STARTS is None:
        first, last = 0, groups
    else:
        first, last = tl.load(STARTS + expert), tl.load(STARTS + expert + 1)
    total = tl.zeros((SIZE, SIZE), tl.float32)
    begin = tl.cast(min(first, groups - 1), tl.int64)
    a_scale, b_scale = tl.load(A_SCALES + begin * N + row), tl.load(B_SCALES + begin * K + column)
    for step in range(first, last):
        a = A.load([above * SIZE, step * SIZE])
        b = B.load([left * SIZE, step * SIZE])
        following = tl.cast(min(step + 1, last - 1), tl.int64)  # the product does not wait for these scales
        a_next, b_next = tl.load(A_SCALES + following * N + row), tl.load(B_SCALES + following * K + column)
        total += tl.dot(a, b.T) * a_scale[:, None] * b_scale[None, :]
        a_scale, b_scale = a_next, b_next
    if TOTALS is None:
        place = (expert * N + row)[:, None] * K + column[None, :]
        tl.store(OUT + place, total.to(OUT.dtype.element_ty))
    elif first < last:
        matrix = tl.multiple_of(tl.load(TOTALS + expert).to(tl.pointer_type(tl.float32)), 16)
        there = matrix + (row.to(tl.int64)[:, None] * K + column[None, :])
        tl.store(there, tl.load(there) + total)


def multiply_rows(
    left: Operand,
    right: Operand,
    spans: RowGroups | None,
    experts: int,
    dtype: torch.dtype,
    launch: Launch = DEFAULT,
) -> Tensor:
    """Computes `left @ right.T`: rows [M, K] and blocks [E * N, K] -> [M, N] in `dtype`."""
    count, inner = left.rows, left.codes.shape[1]
    width = len(right.codes) // experts
    out = left.codes.new_empty(count, width, dtype=dtype)
    tall = -(-count // GROUP) if spans is None else len(spans.first)
    if count:
        with torch.cuda.device_of(out):
            rows_kernel[(tall * (width // GROUP),)](
                _tiles(left), left.scales, _tiles(right), right.scales, out,
                *((None, None, None) if spans is None else (spans.expert, spans.first, spans.last)),
                count, width, inner, len(left.codes), right.scales.shape[0], tall,
                TOGETHER=TOGETHER, SIZE=GROUP, num_warps=launch.warps, num_stages=launch.stages or _stages(out.device),
                maxnreg=launch.registers,
            )  # fmt: skip
    return out


def multiply_columns(
    left: Operand,
    right: Operand,
    spans: RowGroups | None,
    experts: int,
    dtype: torch.dtype,
    launch: Launch = DEFAULT,
) -> Tensor:
    """Computes `left @ right.T` over each expert's groups: columns [N, G * 128] and [K, G * 128] -> [E, N, K] in
    `dtype`."""
    height, width, groups = left.rows, right.rows, left.scales.shape[1]
    if not groups:
        return left.codes.new_zeros(experts, height, width, dtype=dtype)
    out = left.codes.new_empty(experts, height, width, dtype=dtype)
    _launch_columns(left, right, spans, experts, out, None, launch)
    return out


def add_columns(left: Operand, right: Operand, spans: RowGroups | None, totals: Tensor) -> None:
    """Adds `multiply_columns` to the experts' float32 matrices [N, K], which start at multiples of 16 bytes. `totals`
    has their addresses, int64 [E]."""
    if left.scales.shape[1]:
        _launch_columns(left, right, spans, totals.shape[0], None, totals, DEFAULT)


def _launch_columns(
    left: Operand,
    right: Operand,
    spans: RowGroups | None,
    experts: int,
    out: Tensor | None,
    totals: Tensor | None,
    launch: Launch,
) -> None:
    height, width, device = left.rows, right.rows, left.codes.device
    with torch.cuda.device_of(left.codes):
        columns_kernel[((height // GROUP) * (width // GROUP), experts)](
            _tiles(left), left.scales, _tiles(right), right.scales, out, totals,
            None if spans is None else spans.starts, height, width, left.scales.shape[1],
            TOGETHER=TOGETHER, SIZE=GROUP, num_warps=launch.warps, num_stages=launch.stages or _stages(device),
            maxnreg=launch.registers,
        )  # fmt: skip


@functools.cache
def _stages(device: torch.device) -> int:
    """Returns the number of steps that are read ahead, of 32 KiB each: cards of compute capability 8.9 have 99 KiB."""
    return 2 if device.type == "cuda" and torch.cuda.get_device_capability(device)[0] < 9 else 4


def _tiles(operand: Operand) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(operand.codes, [GROUP, GROUP])
