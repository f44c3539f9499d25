"""The quantisers in Triton. A program reads 128 x 128 elements once, and writes their codes by rows, by columns, or
both.

M rows, K columns, R rows of the codes (M rounded up), G groups of 128 rows, E experts. Divisions are rounded to
nearest, so that the bits are those of the reference.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from rl_kernel.fp8.reference import GROUP

WARPS = 8
_ROWS, _BLOCKS = 16, 4
"""torch's products need a row count and a count of scales along K that are multiples of these numbers."""


@dataclass(frozen=True)
class Operand:
    """A rounded matrix. codes: e4m3 [R, K], of which the first `rows` are defined. scales: fp32 [R, K / 128], or [K /
    128 rounded up, N / 128] transposed for blocks; the numbers of a column are contiguous."""

    codes: Tensor
    scales: Tensor
    rows: int


@dataclass(frozen=True)
class RowGroups:
    """The groups of 128 rows of experts whose rows are sorted: no group has rows of two experts. Each field is int32 on
    the device. A group of an expert has the rows first to last - 1, and its position is `group * 128` along the axis of
    transposed codes. The last groups may be empty."""

    expert: Tensor
    first: Tensor
    last: Tensor
    starts: Tensor
    """[E + 1]: the first group of each expert, and the number of groups that are not empty."""

    @classmethod
    def from_ends(cls, ends: Tensor, rows: int) -> RowGroups:
        """Makes the groups from the end of each expert's rows, int32 [E]. The host does not wait for the device."""
        begins = torch.cat((ends.new_zeros(1), ends[:-1]))
        groups = (ends - begins + GROUP - 1) // GROUP
        starts = torch.cat((ends.new_zeros(1), groups.cumsum(0, dtype=torch.int32)))
        numbers = torch.arange(rows // GROUP + len(ends), dtype=torch.int32, device=ends.device)
        expert = torch.bucketize(numbers, starts[1:], right=True, out_int32=True).clamp(max=len(ends) - 1)
        first = begins[expert] + (numbers - starts[expert]) * GROUP
        return cls(expert, first, torch.where(numbers < starts[-1], ends[expert], 0), starts)


@triton.jit
def scale_for(largest, POWER: tl.constexpr):
    """Returns `scales_from(largest)`."""
    scale = tl.math.div_rn(tl.maximum(largest, 1e-10), tl.full(largest.shape, 448.0, tl.float32))
    if POWER:
        scale = ((scale.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)
    return scale


@triton.jit(do_not_specialize=["M", "padded", "groups"])
def quantize_kernel(
    X, CODES, SCALES, T_CODES, T_SCALES, FIRST, LAST, M, padded, stride, K, groups,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, POWER: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Rounds 128 x 128 elements in groups of a row (ROWS) and of a column (COLUMNS)."""
    group, part = tl.program_id(0), tl.program_id(1)
    lane = tl.arange(0, SIZE)
    if FIRST is None:
        row, last = group * SIZE + lane, M
    else:
        row, last = tl.load(FIRST + group) + lane, tl.load(LAST + group)
    row = row.to(tl.int64)
    column = (part * SIZE + lane).to(tl.int64)
    inside = (row < last)[:, None]
    x = tl.load(X + row[:, None] * stride + column[None, :], inside, other=0.0).to(tl.float32)
    if ROWS:
        scale = scale_for(tl.max(tl.abs(x), 1), POWER)
        codes = tl.math.div_rn(x, tl.broadcast_to(scale[:, None], (SIZE, SIZE))).to(tl.float8e4nv)
        tl.store(CODES + row[:, None] * K + column[None, :], codes, inside)
        tl.store(SCALES + part.to(tl.int64) * padded + row, scale, row < last)
    if COLUMNS:
        scale = scale_for(tl.max(tl.abs(x), 0), POWER)
        codes = tl.math.div_rn(x, tl.broadcast_to(scale[None, :], (SIZE, SIZE))).to(tl.float8e4nv)
        place = group.to(tl.int64) * SIZE + lane
        tl.store(T_CODES + column[:, None] * (groups.to(tl.int64) * SIZE) + place[None, :], tl.trans(codes))
        tl.store(T_SCALES + group.to(tl.int64) * K + column, scale)


@triton.jit
def blocks_kernel(
    W, CODES, SCALES, N, K, scale_stride, TURNED: tl.constexpr, POWER: tl.constexpr, SIZE: tl.constexpr
):
    """Rounds a block of 128 x 128 elements of an expert's weight, and transposes it if TURNED."""
    block, part, expert = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    lane = tl.arange(0, SIZE)
    row = (block * SIZE + lane).to(tl.int64)
    column = (part * SIZE + lane).to(tl.int64)
    start = expert * N * K
    w = tl.load(W + start + row[:, None] * K + column[None, :]).to(tl.float32)
    scale = scale_for(tl.max(tl.max(tl.abs(w), 1, keep_dims=True), 0, keep_dims=True), POWER)
    codes = tl.math.div_rn(w, tl.broadcast_to(scale, (SIZE, SIZE))).to(tl.float8e4nv)
    if TURNED:
        tl.store(CODES + start + column[:, None] * N + row[None, :], tl.trans(codes))
        place = (expert * tl.num_programs(1) + part) * scale_stride + block
    else:
        tl.store(CODES + start + row[:, None] * K + column[None, :], codes)
        place = (expert * tl.num_programs(0) + block) * scale_stride + part
    tl.store(SCALES + place + tl.zeros((1, 1), tl.int32), scale)


def quantize(
    x: Tensor, spans: RowGroups | None, *, rows: bool, columns: bool, power_of_two: bool
) -> tuple[Operand | None, Operand | None]:
    """Rounds x [M, K] in groups of 1 x 128 (`rows`), and its transpose [K, G * 128] (`columns`). A column's groups are
    those of `spans`, or all 128 rows from the first; the rest of the last group is zero."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    count, width = x.shape
    padded = -(-count // _ROWS) * _ROWS
    groups = -(-count // GROUP) if spans is None else len(spans.first)
    by_row = by_column = None
    if rows:
        by_row = Operand(*_empty(x, padded, width), count)
    if columns:
        by_column = Operand(*_empty(x, width, groups * GROUP), width)
    if groups:
        with torch.cuda.device_of(x):
            quantize_kernel[(groups, width // GROUP)](
                x, *_pointers(by_row), *_pointers(by_column),
                None if spans is None else spans.first, None if spans is None else spans.last,
                count, padded, x.stride(0), width, groups,
                ROWS=rows, COLUMNS=columns, POWER=power_of_two, SIZE=GROUP, num_warps=WARPS,
            )  # fmt: skip
    return by_row, by_column


def _empty(x: Tensor, rows: int, width: int) -> tuple[Tensor, Tensor]:
    codes = x.new_empty(rows, width, dtype=torch.float8_e4m3fn)
    return codes, x.new_empty(width // GROUP, rows, dtype=torch.float32).T


def _pointers(operand: Operand | None) -> tuple[Tensor | None, Tensor | None]:
    return (None, None) if operand is None else (operand.codes, operand.scales)


def quantize_blocks(weights: Tensor, *, turned: bool, power_of_two: bool) -> Operand:
    """Rounds weights [E, N, K] in blocks of 128 x 128: codes [E * N, K], or those of the transposed weights [E * K, N]
    if `turned`."""
    experts, rows, width = weights.shape
    out, inner = (width, rows) if turned else (rows, width)
    codes = weights.new_empty(experts * out, inner, dtype=torch.float8_e4m3fn)
    stride = -(-inner // (GROUP * _BLOCKS)) * _BLOCKS
    scales = weights.new_zeros(experts * out // GROUP, stride, dtype=torch.float32)
    if experts:
        with torch.cuda.device_of(weights):
            blocks_kernel[(rows // GROUP, width // GROUP, experts)](
                weights.contiguous(), codes, scales, rows, width, stride,
                TURNED=turned, POWER=power_of_two, SIZE=GROUP, num_warps=WARPS,
            )  # fmt: skip
    return Operand(codes, scales.T, experts * out)
