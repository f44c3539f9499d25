"""The quantisers in Triton. A program reads 128 x 128 elements once, and writes their codes by rows, by columns, or
both.

M rows, K columns, R rows of the codes (M rounded up), G groups of 128 rows, E experts. Divisions are rounded to
nearest, so that the bits are those of the reference.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
import triton
import triton.language as tl
from torch import Tensor

from rl_kernel.fp8.kernels.launch import Launcher
from rl_kernel.fp8.reference import GROUP

WARPS, REGISTERS, BLOCK_REGISTERS = 8, 80, 128
"""Warps of a program, and the registers of a thread for rows and columns and for blocks: the fastest of five settings
on an H100. With 80 registers, three programs run on a processor at the same time."""
_ROWS, _BLOCKS = 16, 4
"""torch's products need a row count and a count of scales along K that are multiples of these numbers. DeepGEMM needs
a row count that is a multiple of 4, and blocks without scales that no block has."""


@dataclass(frozen=True)
class Operand:
    """A rounded matrix. codes: e4m3 [R, K], of which the first `rows` are defined. scales: fp32 [R, K / 128], or [K /
    128 rounded up, N / 128] transposed for blocks; the numbers of a column are contiguous."""

    codes: Tensor
    scales: Tensor
    rows: int

    @cached_property
    def by_block(self) -> Tensor:
        """Returns the scales of blocks: [N / 128, K / 128 rounded up], contiguous."""
        return self.scales.T


@dataclass(frozen=True)
class RowGroups:
    """The groups of 128 rows of experts whose rows are sorted: no group has rows of two experts. Each field is int32 on
    the device. A group of an expert has the rows first to last - 1, and its position is `group * 128` along the axis of
    transposed codes. The last groups may be empty."""

    expert: Tensor
    first: Tensor
    last: Tensor
    starts: Tensor
    """[E + 1]: the first group per expert, and the number of groups that are not empty."""
    owner: Tensor
    """[G * 128]: the expert of a group, for each of the 128 rows of a group. -1 in empty groups."""
    slot: Tensor
    """[M]: `group * 128` and the position in the group, for each row."""

    @classmethod
    def from_ends(cls, ends: Tensor, rows: int) -> RowGroups:
        """Makes the groups from where the rows of the experts end, int32 [E]. The host does not wait for the device."""
        experts, groups, device = len(ends), rows // GROUP + len(ends), ends.get_device()
        sizes = groups, groups, groups, experts + 1, groups * GROUP, rows
        fields = [ends.new_empty(size) for size in sizes]
        _launch_groups(
            (device, experts, ends.data_ptr() % 16),
            (groups, 1, 1),
            device,
            *(ends, *fields, experts, max(2, triton.next_power_of_2(experts)), GROUP),
        )
        return cls(*fields)


@triton.jit
def groups_kernel(
    ENDS, EXPERT, FIRST, LAST, STARTS, OWNER, SLOT, experts, WIDTH: tl.constexpr, SIZE: tl.constexpr
):
    """Finds the expert and the rows of a group. The first program also writes where the experts' groups start."""
    group, number, lane = tl.program_id(0), tl.arange(0, WIDTH), tl.arange(0, SIZE)
    inside = number < experts
    ends = tl.load(ENDS + number, inside, other=0)
    begins = tl.load(ENDS + number - 1, inside & (number > 0), other=0)
    counts = tl.where(inside, (ends - begins + SIZE - 1) // SIZE, 0)
    stops = tl.cumsum(counts, 0)
    used = group < tl.sum(counts, 0)
    expert = tl.minimum(tl.sum((inside & (stops <= group)).to(tl.int32), 0), experts - 1)
    mine = number == expert
    first = tl.sum(tl.where(mine, begins + (group - stops + counts) * SIZE, 0), 0)
    last = tl.where(used, tl.sum(tl.where(mine, ends, 0), 0), 0)
    tl.store(EXPERT + group, expert)
    tl.store(FIRST + group, first)
    tl.store(LAST + group, last)
    tl.store(OWNER + group * SIZE + lane, tl.full((SIZE,), 0, tl.int32) + tl.where(used, expert, -1))
    tl.store(SLOT + first + lane, group * SIZE + lane, first + lane < last)
    if group == 0:
        tl.store(STARTS, 0)
        tl.store(STARTS + 1 + number, stops, inside)


_launch_groups = Launcher(groups_kernel)


@triton.jit
def divide(x, divisor, reciprocal):
    """Returns x / divisor rounded to nearest, in three instructions: a quotient and the correction by its remainder."""
    quotient = x * reciprocal
    return tl.fma(tl.fma(-quotient, divisor, x), reciprocal, quotient)


@triton.jit
def scale_for(largest, POWER: tl.constexpr):
    """Returns `scales_from(largest)`. The division is exact for each float32."""
    most, reciprocal = tl.full(largest.shape, 448.0, tl.float32), tl.full(largest.shape, 1 / 448, tl.float32)
    scale = divide(tl.maximum(largest, 1e-10), most, reciprocal)
    scale = tl.where(largest < float("inf"), scale, largest)  # the remainder of infinity is NaN
    if POWER:
        scale = ((scale.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)
    return scale


@triton.jit
def codes_for(x, scale, AXIS: tl.constexpr, FAST: tl.constexpr):
    """Returns the codes of x with a scale per index of the other axis. FAST is exact for values of bfloat16, with any
    reciprocal that is off by at most four units in the last place."""
    wide = tl.broadcast_to(tl.expand_dims(scale, AXIS), x.shape)
    if FAST:
        bounded = tl.minimum(
            scale, 3e38
        )  # with an infinite scale, the remainder of a finite number would be NaN
        reciprocal = 1.0 / scale
        divisor = tl.broadcast_to(tl.expand_dims(bounded, AXIS), x.shape)
        quotient = divide(x, divisor, tl.broadcast_to(tl.expand_dims(reciprocal, AXIS), x.shape))
    else:
        quotient = tl.math.div_rn(x, wide)
    return quotient.to(tl.float8e4nv)


@triton.jit(do_not_specialize=["M", "padded", "groups"])
def quantize_kernel(
    X, CODES, SCALES, T_CODES, T_SCALES, FIRST, LAST, M, padded, stride, K, groups,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, SPACED: tl.constexpr, POWER: tl.constexpr, FAST: tl.constexpr,
    SIZE: tl.constexpr,
):  # fmt: skip
    """Rounds 128 x 128 elements in groups of a row (ROWS) and of a column (COLUMNS). With SPACED, a group's rows go to
    `group * 128`. Offsets in a tile are int32, which halves the registers of addresses."""
    group, part = tl.program_id(0), tl.program_id(1)
    lane = tl.arange(0, SIZE)
    if FIRST is None:
        first, last = group * SIZE, M
    else:
        first, last = tl.load(FIRST + group), tl.load(LAST + group)
    left, inside = part * SIZE, lane < last - first
    start = tl.cast(first, tl.int64)
    read = X + start * stride + left
    x = tl.load(read + (lane[:, None] * stride + lane[None, :]), inside[:, None], other=0.0).to(tl.float32)
    if ROWS:
        scale = scale_for(tl.max(tl.abs(x), 1), POWER)
        above = tl.cast(group, tl.int64) * SIZE if SPACED else start
        place = CODES + above * K + left
        tl.store(place + (lane[:, None] * K + lane[None, :]), codes_for(x, scale, 1, FAST), inside[:, None])
        tl.store(SCALES + tl.cast(part, tl.int64) * padded + above + lane, scale, inside)
    if COLUMNS:
        scale = scale_for(tl.max(tl.abs(x), 0), POWER)
        wide = groups * SIZE
        place = T_CODES + tl.cast(left, tl.int64) * wide + group * SIZE
        tl.store(place + (lane[:, None] * wide + lane[None, :]), tl.trans(codes_for(x, scale, 0, FAST)))
        tl.store(T_SCALES + tl.cast(group, tl.int64) * K + left + lane, scale)


@triton.jit
def blocks_kernel(
    W, CODES, SCALES, T_CODES, T_SCALES, N, K, scale_stride, turned_stride,
    POWER: tl.constexpr, FAST: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Rounds a block of 128 x 128 elements of an expert's weight. Writes it, and the transposed block."""
    block, part, expert = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    lane = tl.arange(0, SIZE)
    row = (block * SIZE + lane).to(tl.int64)
    column = (part * SIZE + lane).to(tl.int64)
    start = expert * N * K
    w = tl.load(W + start + row[:, None] * K + column[None, :]).to(tl.float32)
    largest = tl.max(tl.max(tl.abs(w), 1), 0)
    scale = scale_for(tl.full((SIZE,), 0.0, tl.float32) + largest, POWER)
    codes = codes_for(w, scale, 1, FAST)
    one = tl.max(scale, 0)
    if CODES is not None:
        tl.store(CODES + start + row[:, None] * K + column[None, :], codes)
        tl.store(SCALES + (expert * tl.num_programs(0) + block) * scale_stride + part, one)
    if T_CODES is not None:
        tl.store(T_CODES + start + column[:, None] * N + row[None, :], tl.trans(codes))
        tl.store(T_SCALES + (expert * tl.num_programs(1) + part) * turned_stride + block, one)


_launch_quantize = Launcher(quantize_kernel)


def quantize(
    x: Tensor, spans: RowGroups | None, *, rows: bool, columns: bool, power_of_two: bool, spaced: bool = False
) -> tuple[Operand | None, Operand | None]:
    """Rounds x [M, K] in groups of 1 x 128 (`rows`), and its transpose [K, G * 128] (`columns`). A column's groups are
    those of `spans`, or all 128 rows from the first; the rest of the last group is zero. With `spaced`, the codes by
    rows are [G * 128, K], at the slots of `spans`, and the rest of a group is undefined."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    count, width = x.shape
    groups = -(-count // GROUP) if spans is None else spans.first.shape[0]
    padded = groups * GROUP if spaced else -(-count // _ROWS) * _ROWS
    by_row = by_column = None
    if rows:
        by_row = Operand(*_empty(x, padded, width), count)
    if columns:
        by_column = Operand(*_empty(x, width, groups * GROUP), width)
    if groups:
        device, stride = x.get_device(), x.stride(0)
        forms = rows, columns, spaced, power_of_two, x.dtype is torch.bfloat16
        _launch_quantize(
            (device, x.dtype, x.data_ptr() % 16, stride, width, spans is None, forms, WARPS, REGISTERS),
            (groups, width // GROUP, 1),
            device,
            *(x, *_pointers(by_row), *_pointers(by_column)),
            *((None, None) if spans is None else (spans.first, spans.last)),
            *(count, padded, stride, width, groups, *forms, GROUP),
            num_warps=WARPS,
            maxnreg=REGISTERS,
        )
    return by_row, by_column


def _empty(x: Tensor, rows: int, width: int) -> tuple[Tensor, Tensor]:
    codes = torch.empty(rows, width, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty_strided((rows, width // GROUP), (1, rows), dtype=torch.float32, device=x.device)
    return codes, scales


def _pointers(operand: Operand | None) -> tuple[Tensor | None, Tensor | None]:
    return (None, None) if operand is None else (operand.codes, operand.scales)


def quantize_blocks(
    weights: Tensor, *, plain: bool = True, turned: bool = True, power_of_two: bool, exact: bool = False
) -> tuple[Operand | None, Operand | None]:
    """Rounds weights [E, N, K] in blocks of 128 x 128: codes [E * N, K] (`plain`), and those of the transposed weights
    [E * K, N] (`turned`), in one pass over the weights. With `exact`, there are K / 128 scales per row of blocks, as
    DeepGEMM reads them, and otherwise a multiple of 4, for torch."""
    experts, rows, width = weights.shape
    straight = _empty_blocks(weights, experts * rows, width, exact) if plain else None
    across = _empty_blocks(weights, experts * width, rows, exact) if turned else None
    strides = (0 if each is None else each.scales.shape[0] for each in (straight, across))
    if experts:
        with torch.cuda.device_of(weights):
            blocks_kernel[(rows // GROUP, width // GROUP, experts)](
                weights.contiguous(), *_pointers(straight), *_pointers(across), rows, width, *strides,
                POWER=power_of_two, FAST=weights.dtype is torch.bfloat16, SIZE=GROUP,
                num_warps=WARPS, maxnreg=BLOCK_REGISTERS,
            )  # fmt: skip
    return straight, across


def _empty_blocks(weights: Tensor, rows: int, inner: int, exact: bool) -> Operand:
    codes = weights.new_empty(rows, inner, dtype=torch.float8_e4m3fn)
    stride = inner // GROUP if exact else -(-inner // (GROUP * _BLOCKS)) * _BLOCKS
    make = weights.new_empty if stride * GROUP == inner else weights.new_zeros
    return Operand(codes, make(rows // GROUP, stride, dtype=torch.float32).T, rows)
