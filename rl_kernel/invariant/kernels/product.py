"""The product. It has one tile for few rows and one for many. On an H200 a sum does not depend on the tile: 16 tiles
gave the same bits (benchmarks/reports/bitwise_h200.md). `rl_kernel.invariant.broken` compares the two on each machine.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from rl_kernel.invariant.kernels.rows import readable_rows

INNER, WIDE, MANY = 64, 8192, 1024
"""Inner elements of a tile of the product; outputs from which on it is wider; rows from which on it is larger."""


@triton.jit
def linear_kernel(
    X, W, BIAS, OUT, M, N, K, x_stride, w_stride, out_stride,
    HAS_BIAS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """A tile of X @ W.T + BIAS. Float32 sums over K from first to last. Programs go through GROUP tiles of rows before
    the next columns, so that the weight's tiles stay in the cache."""
    number = tl.program_id(0)
    tall, broad = tl.cdiv(M, ROWS), tl.cdiv(N, COLUMNS)
    group = number // (GROUP * broad)
    height = min(tall - group * GROUP, GROUP)
    row = (group * GROUP + number % (GROUP * broad) % height).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = (number % (GROUP * broad) // height).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    lane = tl.arange(0, INNER)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(0, K, INNER):
        inside = first + lane < K
        x = tl.load(X + row[:, None] * x_stride + first + lane, (row < M)[:, None] & inside, other=0.0)
        w = tl.load(W + column[:, None] * w_stride + first + lane, (column < N)[:, None] & inside, other=0.0)
        total = tl.dot(x, tl.trans(w), total)
    if HAS_BIAS:
        total += tl.load(BIAS + column, column < N, other=0.0).to(tl.float32)[None, :]
    place = OUT + row[:, None] * out_stride + column
    tl.store(place, total.to(OUT.dtype.element_ty), (row < M)[:, None] & (column < N))


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [M, K] and weight [N, K], whose rows are contiguous -> [M, N] in the dtype of x."""
    x, weight = readable_rows(x), readable_rows(weight)
    (rows, inner), outputs = x.shape, len(weight)
    out = x.new_empty(rows, outputs)
    if out.numel():
        if rows >= MANY:
            height, columns, warps, stages = 128, 128, 8, 3
        else:
            height, columns, warps, stages = 64, 128 if outputs >= WIDE else 64, 4, 4
        grid = (triton.cdiv(rows, height) * triton.cdiv(outputs, columns),)
        with torch.cuda.device_of(x):
            linear_kernel[grid](
                x, weight, weight if bias is None else bias, out, rows, outputs, inner,
                x.stride(0), weight.stride(0), out.stride(0),
                HAS_BIAS=bias is not None, ROWS=height, COLUMNS=columns, INNER=INNER, GROUP=8,
                num_warps=warps, num_stages=stages,
            )  # fmt: skip
    return out
