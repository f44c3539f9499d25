"""Kernels for RMSNorm, with or without a residual, and for log-softmax. A program computes one long row, several short
rows, or LANES columns of a row."""

import torch
import triton
import triton.language as tl
from torch import Tensor

LANES = 8192
"""Logits of a row that a program reads."""
NORMED = 2048
"""Number of values that a program normalises if the rows are not longer than this number."""


@triton.jit(do_not_specialize=["rows"])
def rms_norm_kernel(
    X, RESIDUAL, W, OUT, SUM, rows, heads, x_stride, x_head, residual_stride, residual_head, K, eps,
    ADD: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Computes x * rsqrt(mean(x ** 2) + eps), rounded to the dtype, times the weight, as checkpoints expect. With ADD,
    x is X + RESIDUAL, rounded to the dtype, and the kernel writes x to SUM."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    token, head = row // heads, row % heads
    lane = tl.arange(0, BLOCK)[None, :]
    in_row = lane < K
    inside = (row < rows) & in_row
    x = tl.load(X + token * x_stride + head * x_head + lane, inside, other=0.0).to(tl.float32)
    if ADD:
        at = RESIDUAL + token * residual_stride + head * residual_head + lane
        total = (x + tl.load(at, inside, other=0.0).to(tl.float32)).to(SUM.dtype.element_ty)
        tl.store(SUM + row * K + lane, total, inside)
        x = total.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(x * x, 1, keep_dims=True) / K + eps)
    normed = (x * scale).to(OUT.dtype.element_ty).to(tl.float32)
    weight = tl.load(W + lane, in_row, other=0.0).to(tl.float32)
    tl.store(OUT + row * K + lane, (normed * weight).to(OUT.dtype.element_ty), inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Returns the norm, contiguous, of x [N, K] or [N, heads, K], or of x + residual; and the input of the norm."""
    x = readable_rows(x)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    added = residual is not None
    residual = x if residual is None else readable_rows(residual)
    total = torch.empty_like(out) if added else x
    heads = x.shape[1] if x.dim() == 3 else 1
    rows, block = len(x) * heads, next_power_of_two(x.shape[-1])
    # follows from K only, because the order of a sum follows from the tile
    together = max(1, NORMED // block)
    if out.numel():
        with torch.cuda.device_of(x):
            rms_norm_kernel[(-(-rows // together),)](
                x, residual, weight, out, total, rows, heads,
                *row_strides(x), *row_strides(residual), x.shape[-1], eps,
                ADD=added, ROWS=together, BLOCK=block, num_warps=4,
            )  # fmt: skip
    return out, total


@triton.jit(do_not_specialize=["SUMS"])
def part_sums_kernel(X, TOPS, SUMS, x_stride, parts, V, LANES: tl.constexpr):
    """Computes max(x) and sum(exp(x - max(x))) over LANES columns of a row."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = part * LANES + tl.arange(0, LANES)
    x = tl.load(X + row * x_stride + column, column < V, other=-float("inf"))
    top = tl.max(x, 0)
    finite = tl.where(top == -float("inf"), 0.0, top)
    tl.store(TOPS + row * parts + part, top)
    tl.store(SUMS + row * parts + part, tl.sum(tl.exp(x - finite), 0))


@triton.jit(do_not_specialize=["SUMS", "LOG_SUM"])
def log_sums_kernel(TOPS, SUMS, TOP, LOG_SUM, parts, PARTS: tl.constexpr):
    """Computes the maximum of a whole row and the logarithm of its sum, from the results of `part_sums_kernel`."""
    row, part = tl.program_id(0).to(tl.int64), tl.arange(0, PARTS)
    tops = tl.load(TOPS + row * parts + part, part < parts, other=-float("inf"))
    sums = tl.load(SUMS + row * parts + part, part < parts, other=0.0)
    top = tl.max(tops, 0)
    tl.store(TOP + row, top)
    tl.store(LOG_SUM + row, tl.log(tl.sum(sums * tl.exp(tops - top), 0)))


@triton.jit(do_not_specialize=["LOG_SUM"])
def log_probs_kernel(X, TOP, LOG_SUM, OUT, x_stride, V, LANES: tl.constexpr):
    """Computes (x - TOP) - LOG_SUM for LANES columns of a row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * LANES + tl.arange(0, LANES)
    x = tl.load(X + row * x_stride + column, column < V)
    tl.store(OUT + row * V + column, (x - tl.load(TOP + row)) - tl.load(LOG_SUM + row), column < V)


def log_sums(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Returns (`logits.amax(-1)`, `logits.logsumexp(-1) - logits.amax(-1)`) of fp32 logits [N, V], [N, 1] each.

    The distance of rows is always V. Triton makes other code for a distance that is a multiple of 16, and this code may
    add in another order. A single row may have any distance, also if torch calls it contiguous.
    """
    assert logits.dtype == torch.float32, "another dtype may have another order of lanes"
    logits, columns = logits.contiguous(), logits.shape[1]
    rows, parts = len(logits), -(-columns // LANES)
    (tops, sums), (top, log_sum) = logits.new_empty(2, rows, parts), logits.new_empty(2, rows, 1)
    if logits.numel():
        with torch.cuda.device_of(logits):
            part_sums_kernel[(rows, parts)](
                logits, tops, sums, columns, parts, columns, LANES=LANES, num_warps=8
            )
            log_sums_kernel[(rows,)](
                tops, sums, top, log_sum, parts, PARTS=next_power_of_two(parts), num_warps=1
            )
    return top, log_sum


def log_softmax(logits: Tensor) -> Tensor:
    """Returns `(logits - top) - log_sum` with `log_sums`: fp32 [N, V] -> [N, V]."""
    logits = logits.contiguous()
    top, log_sum = log_sums(logits)
    out = logits.new_empty(logits.shape)
    if out.numel():
        with torch.cuda.device_of(logits):
            log_probs_kernel[(len(out), -(-out.shape[1] // LANES))](
                logits, top, log_sum, out, out.shape[1], out.shape[1], LANES=LANES, num_warps=8
            )
    return out


def row_strides(x: Tensor) -> tuple[int, int]:
    """Returns the strides of dimensions 0 and -2 of x [N, K] or [N, heads, K]. A dimension of size 1 gets the stride of
    contiguous rows: torch does not define its stride, and Triton makes other code for multiples of 16, which may add in
    another order. Rows that are parts of wider rows need strides of multiples of 16 on both sides."""
    inner = x.shape[-1]
    last = x.stride(-2) if x.shape[-2] > 1 else inner
    if x.dim() == 2:
        return last, last
    return x.stride(0) if len(x) > 1 else x.shape[1] * inner, last


def next_power_of_two(least: int) -> int:
    """Returns the smallest power of two that is not below `least`. Triton's own function costs the time of a launch."""
    return 1 << (least - 1).bit_length()


def readable_rows(x: Tensor) -> Tensor:
    """Returns `x` if the elements of a row are contiguous, otherwise a copy."""
    return x if x.stride(-1) == 1 or x.shape[-1] <= 1 else x.contiguous()
