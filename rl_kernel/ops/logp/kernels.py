"""Triton kernels over rows of logits: softmax statistics, their merge, and the gradient.

`logp` and the tiles of `linear_logp` share these kernels. Each kernel reads a row in a fixed order and uses no atomics,
so that the same inputs give the same bits. No function here waits for the device.

Legend: C rows, V stored columns of this process (columns from `shard.real` on are padding), P parts to merge. z is a
logit divided by its temperature. Exponents are in units of ln 2, because the hardware's exponential is exp2.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rl_kernel.vocab import VocabShard

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
LOWEST = tl.constexpr(-3.4028234663852886e38)
FLOOR = tl.constexpr(-10000.0)
"""Exponent whose exp2() is 0 and whose product with 0 is 0. Clamping to it keeps columns of -inf out of the entropy
without a select."""

BLOCK = 4096
"""Number of columns that a program takes at a time. All tile widths share one number, because their widths follow
from the number of rows."""
PARTS_BLOCK, ROWS_BLOCK = 16, 128
"""Parts and rows in one step of a merge."""


@triton.jit
def _offsets(columns, stride, UNIT: tl.constexpr):
    """Returns the offsets of columns. Transposed logits have a column stride of C, and C * V may exceed 2**31."""
    if UNIT:
        return columns
    else:
        return columns.to(tl.int64) * stride


@triton.jit
def _rounded(x, ROUND: tl.constexpr):
    if ROUND is not None:
        x = x.to(ROUND)
    return x.to(tl.float32)


@triton.jit
def _tanh(y):
    """Returns tanh, accurate to a few units of 2**-24 of its value. Near 0, the quotient of exponentials would lose
    digits."""
    a = tl.abs(y)
    e = tl.exp2(a * -2.0 * LOG2E)
    s = y * y
    series = a * (1.0 + s * (-0.3333333333 + s * (0.1333333333 + s * (-0.05396825397 + s * 0.02186948854))))
    t = tl.where(a < 0.25, series, (1.0 - e) / (1.0 + e))
    return tl.where(y < 0, -t, t)


@triton.jit
def _logit(x, cap, ROUND: tl.constexpr, CAPPED: tl.constexpr):
    """Returns a rounded logit, capped if the model has a cap. Each step of the cap is rounded, as engines compute
    it."""
    x = _rounded(x, ROUND)
    if CAPPED:
        x = _rounded(_rounded(_tanh(_rounded(x / cap, ROUND)), ROUND) * cap, ROUND)
    return x


@triton.jit
def _absorb(x, top, total, weighted, scale, ENTROPY: tl.constexpr):
    """Adds the columns x of a row to its running maximum and to its sums relative to that maximum."""
    block_top = tl.max(x, 0)
    # The maximum of a row rises in few of its blocks. The other blocks need one exponential per column instead of two.
    if block_top > top:
        shift = tl.maximum((top - block_top) * scale, FLOOR)
        factor = tl.exp2(shift)
        if ENTROPY:
            weighted = factor * (weighted + shift * total)
        total = factor * total
        top = block_top
    y = (x - top) * scale
    e = tl.exp2(y)
    total += tl.sum(e, 0)
    if ENTROPY:
        weighted += tl.sum(e * tl.maximum(y, FLOOR), 0)
    return top, total, weighted


@triton.jit(do_not_specialize=["TARGETS", "OUT", "column_stride", "out_stride", "real"])
def _row_stats_kernel(
    LOGITS, TARGETS, INVERSE, OUT, row_stride, column_stride, out_stride, start, real, limit, cap,
    PER_TOKEN: tl.constexpr, ENTROPY: tl.constexpr, ROUND: tl.constexpr, CAPPED: tl.constexpr, UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    base = LOGITS + row * row_stride
    inverse = tl.load(INVERSE + row).to(tl.float32) if PER_TOKEN else INVERSE
    scale = inverse * LOG2E
    top = tl.full([], LOWEST, tl.float32)
    total = tl.full([], 0.0, tl.float32)
    weighted = tl.full([], 0.0, tl.float32)
    columns = tl.arange(0, BLOCK)
    full = real // BLOCK * BLOCK
    for first in range(0, full, BLOCK):
        x = _logit(tl.load(base + _offsets(first + columns, column_stride, UNIT)), cap, ROUND, CAPPED)
        top, total, weighted = _absorb(x, top, total, weighted, scale, ENTROPY)
    if full < real:
        inside = full + columns < real
        at = base + _offsets(full + columns, column_stride, UNIT)
        x = _logit(tl.load(at, mask=inside, other=0.0), cap, ROUND, CAPPED)
        x = tl.where(inside, x, -float("inf"))
        top, total, weighted = _absorb(x, top, total, weighted, scale, ENTROPY)
    target = tl.load(TARGETS + row).to(tl.int64)
    column = target - start
    owned = (column >= 0) & (column < real)
    at_target = tl.load(base + _offsets(column, column_stride, UNIT), mask=owned, other=0.0)
    at_target = _logit(at_target, cap, ROUND, CAPPED) * inverse
    # For a target outside the vocabulary no shard has a logit. Store NaN, because 0 would look like a logit.
    at_target = tl.where((target >= 0) & (target < limit), at_target, float("nan"))
    tl.store(OUT + row, tl.maximum(top * inverse, LOWEST))
    tl.store(OUT + out_stride + row, total)
    tl.store(OUT + 2 * out_stride + row, at_target)
    if ENTROPY:
        tl.store(OUT + 3 * out_stride + row, weighted * LN2)


@triton.jit(do_not_specialize=["PARTS", "part_stride", "stat_stride", "count", "rows"])
def _merge_kernel(
    PARTS, LOG_PROBS, LSE, ENTROPY, part_stride, stat_stride, row_stride, count, rows,
    BP: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BC + tl.arange(0, BC)
    here = row < rows
    part = tl.arange(0, BP)
    base = PARTS + row.to(tl.int64)[None, :] * row_stride
    top = tl.full([BC], LOWEST, tl.float32)
    for first in range(0, count, BP):
        inside = (first + part < count)[:, None] & here[None, :]
        at = base + (first + part).to(tl.int64)[:, None] * part_stride
        top = tl.maximum(top, tl.max(tl.load(at, mask=inside, other=LOWEST), 0))
    total = tl.zeros([BC], tl.float32)
    at_target = tl.zeros([BC], tl.float32)
    weighted = tl.zeros([BC], tl.float32)
    for first in range(0, count, BP):
        inside = (first + part < count)[:, None] & here[None, :]
        at = base + (first + part).to(tl.int64)[:, None] * part_stride
        shift = tl.maximum(tl.load(at, mask=inside, other=LOWEST) - top[None, :], FLOOR)
        scale = tl.exp2(shift * LOG2E)
        sums = tl.load(at + stat_stride, mask=inside, other=0.0)
        total += tl.sum(scale * sums, 0)
        at_target += tl.sum(tl.load(at + 2 * stat_stride, mask=inside, other=0.0), 0)
        if ENTROPY is not None:
            products = tl.load(at + 3 * stat_stride, mask=inside, other=0.0)
            weighted += tl.sum(scale * (products + shift * sums), 0)
    log_total = tl.log(total)
    tl.store(LOG_PROBS + row, at_target - top - log_total, mask=here)
    tl.store(LSE + row, top + log_total, mask=here)
    if ENTROPY is not None:
        tl.store(ENTROPY + row, log_total - weighted / total, mask=here)


@triton.jit(
    do_not_specialize=[
        "TARGETS",
        "GRAD",
        "GRAD_ENTROPY",
        "column_stride",
        "out_column_stride",
        "grad_stride",
        "grad_entropy_stride",
        "blocks",
        "real",
    ]
)
def _logits_grad_kernel(
    LOGITS, OUT, TARGETS, LSE, ENTROPY, GRAD, GRAD_ENTROPY, INVERSE,
    row_stride, column_stride, out_row_stride, out_column_stride, grad_stride, grad_entropy_stride,
    blocks, start, real, stored, cap,
    PER_TOKEN: tl.constexpr, ROUND: tl.constexpr, CAPPED: tl.constexpr, UNIT: tl.constexpr, OUT_UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    row = (program // blocks).to(tl.int64)
    first = program % blocks * BLOCK
    columns = first + tl.arange(0, BLOCK)
    at = LOGITS + row * row_stride + _offsets(columns, column_stride, UNIT)
    # The padding is read too: a mask by `real`, which may be odd, would split each load into single columns.
    x = tl.load(at, mask=columns < stored, other=-float("inf"))
    x = _logit(tl.where(columns < real, x, -float("inf")), cap, ROUND, CAPPED)
    inverse = tl.load(INVERSE + row).to(tl.float32) if PER_TOKEN else INVERSE
    log_p = x * inverse - tl.load(LSE + row)
    p = tl.exp2(log_p * LOG2E)
    grad = 0.0
    slope = 0.0
    if GRAD is not None:
        grad = tl.load(GRAD + row * grad_stride).to(tl.float32) * inverse
        slope = -grad
    if GRAD_ENTROPY is not None:
        h = tl.load(GRAD_ENTROPY + row * grad_entropy_stride).to(tl.float32) * inverse
        d = p * (slope - h * (tl.maximum(log_p, FLOOR) + tl.load(ENTROPY + row)))
    else:
        d = p * slope
    if GRAD is not None:
        column = tl.load(TARGETS + row).to(tl.int64) - start
        if (column >= first) & (column < first + BLOCK):
            d += tl.where(columns == column, grad, 0.0)
    if CAPPED:
        d *= 1.0 - (x / cap) * (x / cap)
    if first + BLOCK > real:
        d = tl.where(columns < real, d, 0.0)  # also where the row's gradient is NaN
    out = OUT + row * out_row_stride + _offsets(columns, out_column_stride, OUT_UNIT)
    tl.store(out, d.to(OUT.dtype.element_ty), mask=columns < stored)


_ROUNDING = {None: None, torch.float32: None, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def row_stats(
    logits: Tensor,
    targets: Tensor,
    inv_temperature: float | Tensor,
    shard: VocabShard,
    with_entropy: bool,
    rounding: torch.dtype | None = None,
    out: Tensor | None = None,
    cap: float | None = None,
) -> Tensor:
    """Returns `vocab.row_stats` [3 or 4, C] float32 of the real columns of logits [C, V] times the inverse temperature
    (a number or [C]). The target's logit is NaN for a target outside the vocabulary.

    `out` receives the result; its rows must be contiguous. `rounding`: the dtype to which the logits are rounded first.
    `cap`: their soft cap, or None. Reads the logits once.
    """
    rows = len(logits)
    if out is None:
        out = logits.new_empty(3 + with_entropy, rows, dtype=torch.float32)
    if rows == 0:
        return out
    per_token = isinstance(inv_temperature, Tensor)
    _row_stats_kernel[(rows,)](
        logits, targets.contiguous(), _dense(inv_temperature), out,
        logits.stride(0), logits.stride(1), out.stride(0), shard.start, shard.real, shard.limit, float(cap or 1),
        PER_TOKEN=per_token, ENTROPY=with_entropy, ROUND=_ROUNDING[rounding], CAPPED=cap is not None,
        UNIT=logits.stride(1) == 1, BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip
    return out


def merge(
    parts: Tensor, out: tuple[Tensor, Tensor, Tensor | None] | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Returns log-probs [C], log-sum-exp [C] and entropy [C] (None without a fourth row) from `row_stats` parts [P, 3
    or 4, C] float32 of disjoint columns, with any strides. One launch adds in the order of P. `out` receives the
    results, each contiguous."""
    count, stats, rows = parts.shape
    if out is None:
        log_probs, lse = parts.new_empty(rows), parts.new_empty(rows)
        out = log_probs, lse, parts.new_empty(rows) if stats == 4 else None
    if rows:
        _merge_kernel[(triton.cdiv(rows, ROWS_BLOCK),)](
            parts, *out, *parts.stride(), count, rows, BP=PARTS_BLOCK, BC=ROWS_BLOCK, num_warps=4
        )
    return out


def logits_grad(
    logits: Tensor,
    targets: Tensor,
    lse: Tensor,
    entropy: Tensor | None,
    shard: VocabShard,
    grad_log_probs: Tensor | None,
    grad_entropy: Tensor | None,
    inv_temperature: float | Tensor,
    out: Tensor,
    rounding: torch.dtype | None = None,
    cap: float | None = None,
) -> Tensor:
    """Computes the gradient in the logits [C, V] before temperature, cap and rounding. Without a cap, it is `inv_t * (g
    * (onehot(target) - p) - h * p * (log p + entropy))` for upstream gradients g, h [C]; 0 in the padding.

    Writes the gradient into `out` [C, V] of any float dtype, which may be `logits` itself. Reads `entropy` only for
    `grad_entropy`.
    """
    rows, stored = logits.shape
    if rows == 0:
        return out
    per_token = isinstance(inv_temperature, Tensor)
    blocks = triton.cdiv(stored, BLOCK)
    g, h = grad_log_probs, grad_entropy
    _logits_grad_kernel[(rows * blocks,)](
        logits, out, targets.contiguous(), lse.contiguous(), None if h is None else _dense(entropy), g, h,
        _dense(inv_temperature), *logits.stride(), *out.stride(),
        0 if g is None else g.stride(0), 0 if h is None else h.stride(0), blocks, shard.start, shard.real, stored,
        float(cap or 1),
        PER_TOKEN=per_token, ROUND=_ROUNDING[rounding], CAPPED=cap is not None,
        UNIT=logits.stride(1) == 1, OUT_UNIT=out.stride(1) == 1, BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip
    return out


def _dense(value: float | Tensor | None) -> float | Tensor | None:
    return value.contiguous() if isinstance(value, Tensor) else value
