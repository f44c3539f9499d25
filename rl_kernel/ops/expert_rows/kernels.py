"""`expert_dispatch` and `expert_combine` in Triton: one kernel copies tokens to rows, the other sums the rows of a
token.

Each program handles a block of a token's columns. A kernel reads or writes each row once, so that no atomic addition
is needed. Legend: T tokens, K experts of a token, C rows, H columns.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK, WARPS = 2048, 4


@triton.jit(do_not_specialize=["W", "ROWS"])
def spread_kernel(X, W, ROWS, OUT, OUT_W, x_stride, H, K: tl.constexpr, BLOCK: tl.constexpr):
    """Writes a block of a token's columns to the token's rows, and each row's weight."""
    token = tl.program_id(0).to(tl.int64)
    lane = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = lane < H
    x = tl.load(X + token * x_stride + lane, inside, other=0.0)
    for k in range(K):
        row = tl.load(ROWS + token * K + k).to(tl.int64)
        if row >= 0:
            tl.store(OUT + row * H + lane, x, inside)
            if W is not None:  # noqa: SIM102  # decided when the kernel is compiled
                if tl.program_id(1) == 0:
                    tl.store(OUT_W + row, tl.load(W + token * K + k))


@triton.jit(do_not_specialize=["W", "ROWS"])
def gather_sum_kernel(Y, W, ROWS, OUT, OUT_W, y_stride, H, K: tl.constexpr, BLOCK: tl.constexpr):
    """Sums a block of columns over the rows of a token in float32, and reads each row's weight."""
    token = tl.program_id(0).to(tl.int64)
    lane = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = lane < H
    total = tl.zeros([BLOCK], tl.float32)
    for k in range(K):
        row = tl.load(ROWS + token * K + k).to(tl.int64)
        if row >= 0:
            total += tl.load(Y + row * y_stride + lane, inside, other=0.0).to(tl.float32)
        if W is not None:  # noqa: SIM102  # decided when the kernel is compiled
            if tl.program_id(1) == 0:
                weight = tl.load(W + row, mask=row >= 0, other=0.0)
                tl.store(OUT_W + token * K + k, weight)
    tl.store(OUT + token * H + lane, total.to(OUT.dtype.element_ty), inside)


def spread(x: Tensor, weights: Tensor | None, rows: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """Copies x [T, H], weights [T, K], rows [T, K] -> [total, H] and [total] (empty without weights)."""
    x, rows = _rows(x), rows.contiguous()
    out = x.new_empty(total, x.shape[1])
    row_weights = x.new_empty(0) if weights is None else weights.new_empty(total)
    weights = None if weights is None else weights.contiguous()
    _launch(spread_kernel, x, weights, rows, out, row_weights)
    return out, row_weights


def gather_sum(
    y: Tensor, row_weights: Tensor | None, rows: Tensor, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """Sums y [C, H], row_weights [C], rows [T, K] -> [T, H] in `dtype` (default: the dtype of y) and [T, K] (empty
    without weights)."""
    y, rows = _rows(y), rows.contiguous()
    out = y.new_empty(rows.shape[0], y.shape[1], dtype=dtype)
    weights = y.new_empty(0) if row_weights is None else row_weights.new_empty(rows.shape)
    row_weights = None if row_weights is None else row_weights.contiguous()
    _launch(gather_sum_kernel, y, row_weights, rows, out, weights)
    return out, weights


def _launch(
    kernel: object, source: Tensor, w: Tensor | None, rows: Tensor, out: Tensor, out_w: Tensor
) -> None:
    tokens, topk = rows.shape
    width = source.shape[1]
    # Without columns the weights are still copied: one block with no column inside.
    blocks = max(triton.cdiv(width, BLOCK), 1)
    if tokens == 0 or (width == 0 and w is None):
        return
    with torch.cuda.device_of(source):
        kernel[(tokens, blocks)](  # type: ignore[index]
            source, w, rows, out, out_w, source.stride(0), width, K=topk, BLOCK=BLOCK, num_warps=WARPS
        )


def _rows(x: Tensor) -> Tensor:
    """Returns `x` if the elements of a row are contiguous, otherwise a copy."""
    return x if x.stride(-1) == 1 or x.shape[-1] <= 1 else x.contiguous()
