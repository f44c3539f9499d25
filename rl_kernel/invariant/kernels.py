"""Triton kernels whose result for a row does not depend on the other rows: product, RMSNorm, attention.

A row meets its inputs in one fixed order. No sum is split over programs, and nothing is added atomically. So a row of a
batch of 1 and of 10,000 takes the same steps. What stands in the other rows of its tile never enters its sums.

The product has one tile for few rows and one for many. On an H200 a sum does not depend on the tile: 16 tiles gave the
same bits (benchmarks/reports/bitwise_h200.md). `rl_kernel.invariant.broken` compares the two on each machine.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

INNER, WIDE, MANY = 64, 8192, 1024
"""Inner elements of a tile of the product; outputs from which on it is wider; rows from which on it is larger."""
QUERIES, KEYS = 64, 64
"""Of one step of the attention."""
LOG2_E = 1.4426950408889634


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
    x, weight = _rows(x), _rows(weight)
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


@triton.jit
def rms_norm_kernel(X, W, OUT, x_stride, K, eps, BLOCK: tl.constexpr):
    """One row: x * rsqrt(mean(x ** 2) + eps), rounded to the dtype, times the weight, as checkpoints expect."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    inside = lane < K
    x = tl.load(X + row * x_stride + lane, inside, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(x * x, 0) / K + eps)
    normed = (x * scale).to(OUT.dtype.element_ty).to(tl.float32)
    weight = tl.load(W + lane, inside, other=0.0).to(tl.float32)
    tl.store(OUT + row * K + lane, (normed * weight).to(OUT.dtype.element_ty), inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [N, K] -> [N, K], contiguous."""
    x = _rows(x)
    out = x.new_empty(x.shape)
    if out.numel():
        with torch.cuda.device_of(x):
            rms_norm_kernel[(len(x),)](
                x, weight, out, x.stride(0), x.shape[1], eps,
                BLOCK=triton.next_power_of_2(x.shape[1]), num_warps=4,
            )  # fmt: skip
    return out


@triton.jit
def attention_kernel(
    Q, K, V, OUT, FIRST_QUERY, FIRST_KEY, LENGTH, TABLE,
    q_stride, q_head, k_page, k_slot, k_head, v_page, v_slot, v_head, out_stride, out_head, table_stride, scale,
    PAGE: tl.constexpr, SHARED: tl.constexpr, SIZE: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """QUERIES rows of one head of one sequence. Keys come in steps of KEYS from the first one on. A step whose keys a
    row does not see multiplies its sums by 1 and adds 0.

    PAGE 0: the keys of a sequence are rows from FIRST_KEY on. Otherwise they are on the pages of its row of TABLE.
    """
    sequence, head = tl.program_id(2), tl.program_id(1)
    first = tl.load(FIRST_QUERY + sequence)
    count = tl.load(FIRST_QUERY + sequence + 1) - first
    length = tl.load(LENGTH + sequence)
    number = tl.program_id(0) * QUERIES + tl.arange(0, QUERIES)
    if tl.program_id(0) * QUERIES < count:
        row = (first + number).to(tl.int64)
        lane, step = tl.arange(0, SIZE), tl.arange(0, KEYS)
        here = (number < count)[:, None]
        q = tl.load(Q + row[:, None] * q_stride + head * q_head + lane, here, other=0.0)
        place = length - count + number
        end = min(length, length - count + (tl.program_id(0) + 1) * QUERIES)
        group = head // SHARED
        top = tl.full((QUERIES,), -float("inf"), tl.float32)
        total = tl.zeros((QUERIES,), tl.float32)
        sums = tl.zeros((QUERIES, SIZE), tl.float32)
        for start in range(0, end, KEYS):
            key = start + step
            there = key < end
            if PAGE == 0:
                slot = (tl.load(FIRST_KEY + sequence) + key).to(tl.int64)
                at_k, at_v = slot * k_slot, slot * v_slot
            else:
                page = tl.load(TABLE + sequence * table_stride + key // PAGE, there, other=0).to(tl.int64)
                slot = (key % PAGE).to(tl.int64)
                at_k, at_v = page * k_page + slot * k_slot, page * v_page + slot * v_slot
            k = tl.load(K + at_k[:, None] + group * k_head + lane, there[:, None], other=0.0)
            v = tl.load(V + at_v[:, None] + group * v_head + lane, there[:, None], other=0.0)
            scores = tl.dot(q, tl.trans(k)) * scale
            seen = (key[None, :] <= place[:, None]) & there[None, :]
            scores = tl.where(seen, scores, -float("inf"))
            highest = tl.maximum(top, tl.max(scores, 1))
            finite = tl.where(highest == -float("inf"), 0.0, highest)
            shares = tl.exp2(scores - finite[:, None])
            shrunk = tl.exp2(top - finite)
            total = total * shrunk + tl.sum(shares, 1)
            sums = tl.dot(shares.to(v.dtype), v, sums * shrunk[:, None])
            top = highest
        out = sums / tl.where(total == 0.0, 1.0, total)[:, None]
        tl.store(OUT + row[:, None] * out_stride + head * out_head + lane, out.to(OUT.dtype.element_ty), here)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    first_query: Tensor,
    lengths: Tensor,
    most_queries: int,
    scale: float,
    *,
    first_key: Tensor | None = None,
    table: Tensor | None = None,
) -> Tensor:
    """Causal attention of sequences into `out` [T, A, D]: query [T, A, D], rows first_query[s] to first_query[s + 1].

    `lengths` [S]: keys of each sequence; its last query is at its last key. Keys and values [K, G, D] from row
    first_key[s] on, or [pages, page, G, D] on the pages table[s]. D must be a power of two.
    """
    sequences, heads, size = len(lengths), query.shape[1], query.shape[2]
    if not sequences or not most_queries:
        return out
    paged = table is not None
    page_strides = (key.stride(0), value.stride(0)) if paged else (0, 0)
    assert query.stride(2) == key.stride(-1) == value.stride(-1) == out.stride(2) == 1
    with torch.cuda.device_of(query):
        attention_kernel[(triton.cdiv(most_queries, QUERIES), heads, sequences)](
            query, key, value, out, first_query, first_query if first_key is None else first_key, lengths,
            first_query if table is None else table,
            query.stride(0), query.stride(1), page_strides[0], key.stride(-3), key.stride(-2),
            page_strides[1], value.stride(-3), value.stride(-2), out.stride(0), out.stride(1),
            0 if table is None else table.stride(0), scale * LOG2_E,
            PAGE=key.shape[1] if paged else 0, SHARED=heads // key.shape[-2], SIZE=size,
            QUERIES=QUERIES, KEYS=KEYS, num_warps=4, num_stages=2,
        )  # fmt: skip
    return out


def _rows(x: Tensor) -> Tensor:
    """`x` itself if the elements of a row are contiguous, otherwise a copy."""
    return x if x.stride(-1) == 1 or x.shape[-1] <= 1 else x.contiguous()
