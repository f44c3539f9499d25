"""Triton kernels for kept ids: the log-prob over the ids that a rollout kept, and the entropy over all columns.

Few ids are kept. So the kernels of `kernels` process all columns, and three small kernels process only the ids. No
masked copy of a tile is needed. `logp` and `PlainHead` share these kernels. The rules of `kernels` apply: a fixed
order, no atomics, no wait for the device.

Legend: C rows, V columns of a tile, P parts to merge, M kept ids in total. z [M] is
each id's logit divided by its token's temperature, or -inf if another process has the column.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rl_kernel.collectives import gather_stack
from rl_kernel.kept import KeptTokens, repeated
from rl_kernel.ops.logp.kernels import (
    _ROUNDING,
    FLOOR,
    LOG2E,
    LOWEST,
    _absorb,
    _dense,
    _logit,
    _offsets,
    logits_grad,
    merge,
)
from rl_kernel.vocab import VocabShard, combined

IDS_BLOCK = 256


@triton.jit
def _ids_range(OFFSETS, row, count):
    """Returns the start and the end of a row's ids. Both are within the ids, even if the offsets are wrong."""
    return tl.maximum(tl.load(OFFSETS + row), 0), tl.minimum(tl.load(OFFSETS + row + 1), count)


@triton.jit(do_not_specialize=["IDS", "OFFSETS", "column_stride", "real", "count"])
def _pick_kernel(
    TILE, INVERSE, IDS, OFFSETS, Z, row_stride, column_stride, start, real, count, cap,
    PER_TOKEN: tl.constexpr, ROUND: tl.constexpr, CAPPED: tl.constexpr, UNIT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    first, stop = _ids_range(OFFSETS, row, count)
    base = TILE + row * row_stride
    inverse = tl.load(INVERSE + row).to(tl.float32) if PER_TOKEN else INVERSE
    for begin in range(first, stop, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        column = tl.load(IDS + at, mask=at < stop, other=-1).to(tl.int64) - start
        here = (at < stop) & (column >= 0) & (column < real)
        x = tl.load(base + _offsets(column, column_stride, UNIT), mask=here, other=0.0)
        tl.store(Z + at, _logit(x, cap, ROUND, CAPPED) * inverse, mask=here)


@triton.jit(do_not_specialize=["IDS", "OFFSETS", "TARGETS", "out_stride", "count"])
def _kept_stats_kernel(
    Z, AGAIN, IDS, OFFSETS, TARGETS, OUT, out_stride, start, real, limit, count, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    first, stop = _ids_range(OFFSETS, row, count)
    target = tl.load(TARGETS + row).to(tl.int64)
    at_target = tl.full([], -float("inf"), tl.float32)  # of a target that was not kept
    top = tl.full([], LOWEST, tl.float32)
    total = tl.full([], 0.0, tl.float32)
    weighted = tl.full([], 0.0, tl.float32)
    for begin in range(first, stop, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        counts = (at < stop) & (tl.load(AGAIN + at, mask=at < stop, other=0) == 0)
        z = tl.load(Z + at, mask=counts, other=-float("inf"))
        token = tl.load(IDS + at, mask=counts, other=-1).to(tl.int64)
        at_target = tl.maximum(at_target, tl.max(tl.where(token == target, z, -float("inf")), 0))
        top, total, weighted = _absorb(z, top, total, weighted, LOG2E, False)
    owned = (target >= start) & (target < start + real)
    at_target = tl.where(owned, at_target, 0.0)
    at_target = tl.where((target >= 0) & (target < limit), at_target, float("nan"))
    tl.store(OUT + row, tl.maximum(top, LOWEST))
    tl.store(OUT + out_stride + row, total)
    tl.store(OUT + 2 * out_stride + row, at_target)


@triton.jit(
    do_not_specialize=[
        "IDS",
        "OFFSETS",
        "TARGETS",
        "GRAD",
        "GRAD_ENTROPY",
        "out_column_stride",
        "grad_stride",
        "grad_entropy_stride",
        "real",
        "count",
    ]
)
def _kept_grad_kernel(
    OUT, Z, IDS, OFFSETS, TARGETS, LSE, WHOLE_LSE, ENTROPY, GRAD, GRAD_ENTROPY, INVERSE,
    out_row_stride, out_column_stride, grad_stride, grad_entropy_stride, start, real, count, cap,
    PER_TOKEN: tl.constexpr, CAPPED: tl.constexpr, UNIT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    first, stop = _ids_range(OFFSETS, row, count)
    inverse = tl.load(INVERSE + row).to(tl.float32) if PER_TOKEN else INVERSE
    grad = tl.load(GRAD + row * grad_stride).to(tl.float32) * inverse
    target = tl.load(TARGETS + row).to(tl.int64)
    lse = tl.load(LSE + row)
    base = OUT + row * out_row_stride
    for begin in range(first, stop, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        token = tl.load(IDS + at, mask=at < stop, other=-1).to(tl.int64)
        column = token - start
        here = (at < stop) & (column >= 0) & (column < real)
        z = tl.load(Z + at, mask=here, other=-float("inf"))
        d = tl.where(token == target, grad, 0.0) - grad * tl.exp2((z - lse) * LOG2E)
        if GRAD_ENTROPY is not None:
            h = tl.load(GRAD_ENTROPY + row * grad_entropy_stride).to(tl.float32) * inverse
            log_p = z - tl.load(WHOLE_LSE + row)
            d -= h * tl.exp2(log_p * LOG2E) * (tl.maximum(log_p, FLOOR) + tl.load(ENTROPY + row))
        if CAPPED:
            ratio = z / (inverse * cap)
            d *= 1.0 - ratio * ratio
        # An id that occurs twice is written twice, with the same number.
        tl.store(base + _offsets(column, out_column_stride, UNIT), d.to(OUT.dtype.element_ty), mask=here)


def no_logits(kept: KeptTokens, like: Tensor) -> Tensor:
    """Returns z [M] filled with -inf, before any logit is read."""
    return like.new_full(kept.ids.shape, -torch.inf, dtype=torch.float32)


def pick_(
    z: Tensor,
    tile: Tensor,
    kept: KeptTokens,
    inv_temperature: float | Tensor,
    shard: VocabShard,
    rounding: torch.dtype | None = None,
    cap: float | None = None,
) -> Tensor:
    """Writes the logits of the ids in this tile [C, V] into z. `shard` is the tile's shard."""
    if z.numel():
        _pick_kernel[(len(tile),)](
            tile, _dense(inv_temperature), kept.ids.contiguous(), kept.offsets.contiguous(), z, *tile.stride(),
            shard.start, shard.real, len(z), float(cap or 1), PER_TOKEN=isinstance(inv_temperature, Tensor),
            ROUND=_ROUNDING[rounding], CAPPED=cap is not None, UNIT=tile.stride(1) == 1, BLOCK=IDS_BLOCK, num_warps=4,
        )  # fmt: skip
    return z


def kept_stats(z: Tensor, kept: KeptTokens, targets: Tensor, shard: VocabShard) -> Tensor:
    """Returns `row_stats` [3, C] float32 of the softmax over the ids in this process. A row without ids has a sum of
    0."""
    rows = len(targets)
    out = z.new_empty(3, rows)
    if rows:
        again = repeated(kept, shard.limit).view(torch.uint8)
        _kept_stats_kernel[(rows,)](
            z, again, kept.ids.contiguous(), kept.offsets.contiguous(), targets.contiguous(), out,
            out.stride(0), shard.start, shard.real, shard.limit, len(z), BLOCK=IDS_BLOCK, num_warps=4,
        )  # fmt: skip
    return out


def merge_kept(
    parts: Tensor, z: Tensor, kept: KeptTokens, targets: Tensor, shard: VocabShard
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """Returns log-probs and log-sum-exp of the kept columns, then entropy and log-sum-exp over all columns, [C] each.
    The entropy is None without a fourth row. The inputs are `row_stats` parts [P, 3 or 4, C] of this process and z.
    Runs one all-gather."""
    stats = torch.cat([combined(parts), kept_stats(z, kept, targets, shard)])
    parts = gather_stack(stats, shard.group)
    log_probs, whole_lse, entropy = merge(parts[:, :-3])
    kept_columns = merge(parts[:, -3:])
    truncated = kept.truncated
    log_probs = torch.where(truncated, kept_columns[0], log_probs)
    return log_probs, torch.where(truncated, kept_columns[1], whole_lse), entropy, whole_lse


def kept_logits_grad(
    logits: Tensor,
    z: Tensor,
    kept: KeptTokens,
    targets: Tensor,
    lse: Tensor,
    whole_lse: Tensor,
    entropy: Tensor | None,
    shard: VocabShard,
    grad_log_probs: Tensor | None,
    grad_entropy: Tensor | None,
    inv_temperature: float | Tensor,
    out: Tensor,
    rounding: torch.dtype | None = None,
    cap: float | None = None,
) -> Tensor:
    """Computes `logits_grad` of a tile [C, V]: the gradient of the log-prob in the kept columns, and the gradient of
    the entropy in all columns.

    The first launch writes all columns, without the log-probs of truncated rows. The second launch overwrites the kept
    columns of truncated rows.
    """
    g, h = grad_log_probs, grad_entropy
    others = None if g is None else torch.where(kept.truncated, 0, g)
    logits_grad(logits, targets, whole_lse, entropy, shard, others, h, inv_temperature, out, rounding, cap)
    if g is not None and z.numel():
        _kept_grad_kernel[(len(out),)](
            out, z, kept.ids.contiguous(), kept.offsets.contiguous(), targets.contiguous(), lse, whole_lse,
            None if h is None else entropy, g, h, _dense(inv_temperature), *out.stride(), g.stride(0),
            0 if h is None else h.stride(0), shard.start, shard.real, len(z), float(cap or 1),
            PER_TOKEN=isinstance(inv_temperature, Tensor), CAPPED=cap is not None, UNIT=out.stride(1) == 1,
            BLOCK=IDS_BLOCK, num_warps=4,
        )  # fmt: skip
    return out
