"""Causal attention over packed keys (a trainer) and paged keys (an engine).

With a window, a query sees the newest WINDOW keys up to its own, and WINDOW 0 means all keys up to its own. The steps
over the keys are those of WINDOW 0, but a tile begins at the first step with a key that one of its rows sees. A row
that sees no key of this step has sums of 0 after it, with which each row begins. Keys before the window of the first
row are not loaded, because an engine may have given their pages to another sequence.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS, FEW_ROWS, KEYS = 128, 16, 64
"""Sizes of a step: (query, head) pairs that share keys, the smaller number of such pairs for short sequences, and
keys."""
ONES = tl.constexpr(16)
"""Number of columns of the matrix of ones that sums the shares: the fewest columns that a product takes."""
LOG2_E = 1.4426950408889634
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def find_keys(key, there, FIRST_KEY, TABLE, PAGE: tl.constexpr):
    """Returns each key's page and its slot in this page."""
    if PAGE == 0:
        page, slot = key, (tl.load(FIRST_KEY) + key).to(tl.int64)
    else:
        page = tl.load(TABLE + key // PAGE, there, other=0).to(tl.int64)
        slot = (key % PAGE).to(tl.int64)
    return page, slot


@triton.jit(
    do_not_specialize=["FIRST_QUERY", "FIRST_KEY", "LENGTH", "TABLE", "lse_head", "table_stride", "most_keys"]
)
def attention_kernel(
    Q, K, V, OUT, LSE, FIRST_QUERY, FIRST_KEY, LENGTH, TABLE,
    q_stride, q_head, k_page, k_slot, k_head, v_page, v_slot, v_head, out_stride, out_head, lse_head, table_stride,
    most_keys, scale, PAGE: tl.constexpr, SHARED: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr,
    KEYS: tl.constexpr, HAS_LSE: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Computes ROWS rows of a sequence. A row is a pair of a query and one of the SHARED heads that share keys. The
    loop reads the keys in steps of KEYS from the first key on. A step whose keys a row does not see multiplies the
    row's sums by 1 and adds 0.

    PAGE 0: the keys of a sequence are rows from FIRST_KEY on. Otherwise the keys are on the pages in the sequence's row
    of TABLE, which has pages for `most_keys` keys.
    """
    sequence, group = tl.program_id(2), tl.program_id(1)
    first = tl.load(FIRST_QUERY + sequence)
    count = tl.load(FIRST_QUERY + sequence + 1) - first
    length = tl.load(LENGTH + sequence)
    start_row = tl.program_id(0) * ROWS
    if start_row < count * SHARED:
        number = (start_row + tl.arange(0, ROWS)) // SHARED
        head = group * SHARED + (start_row + tl.arange(0, ROWS)) % SHARED
        row = (first + number).to(tl.int64)
        lane, step = tl.arange(0, SIZE), tl.arange(0, KEYS)
        here = (number < count)[:, None]
        q = tl.load(Q + row[:, None] * q_stride + head[:, None] * q_head + lane, here, other=0.0)
        position = length - count + number
        end = min(min(length, most_keys), length - count + (start_row + ROWS - 1) // SHARED + 1)
        oldest = tl.maximum(length - count + start_row // SHARED - WINDOW + 1, 0) if WINDOW else 0
        top = tl.full((ROWS,), -float("inf"), tl.float32)
        # A product with ones adds the shares of a row. tl.sum adds in an order that depends on ROWS.
        ones = tl.full((KEYS, ONES), 1.0, Q.dtype.element_ty)
        total = tl.zeros((ROWS, ONES), tl.float32)
        sums = tl.zeros((ROWS, SIZE), tl.float32)
        for start in range(oldest // KEYS * KEYS, end, KEYS):
            key = start + step
            there = (key < end) & (key >= oldest) if WINDOW else key < end
            page, slot = find_keys(key, there, FIRST_KEY + sequence, TABLE + sequence * table_stride, PAGE)
            if PAGE == 0:
                at_k, at_v = slot * k_slot, slot * v_slot
            else:
                at_k, at_v = page * k_page + slot * k_slot, page * v_page + slot * v_slot
            k = tl.load(K + at_k[:, None] + group * k_head + lane, there[:, None], other=0.0)
            v = tl.load(V + at_v[:, None] + group * v_head + lane, there[:, None], other=0.0)
            scores = tl.dot(q, tl.trans(k)) * scale
            seen = (key[None, :] <= position[:, None]) & there[None, :]
            seen = seen & (key[None, :] > position[:, None] - WINDOW) if WINDOW else seen
            scores = tl.where(seen, scores, -float("inf"))
            highest = tl.maximum(top, tl.max(scores, 1))
            finite = tl.where(highest == -float("inf"), 0.0, highest)
            shares = tl.exp2(scores - finite[:, None]).to(v.dtype)
            shrunk = tl.exp2(top - finite)[:, None]
            total = tl.dot(shares, ones, total * shrunk)
            sums = tl.dot(shares, v, sums * shrunk)
            top = highest
        total = tl.max(total, 1)  # its columns are equal
        out = sums / tl.where(total == 0.0, 1.0, total)[:, None]
        to = OUT + row[:, None] * out_stride + head[:, None] * out_head + lane
        tl.store(to, out.to(OUT.dtype.element_ty), here)
        if HAS_LSE:
            tl.store(LSE + head * lse_head + row, (top + tl.log2(total)) * LN_2, number < count)


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
    lse: Tensor | None = None,
    window: int | None = None,
) -> Tensor:
    """Computes causal attention of sequences into `out` [T, A, D]: query [T, A, D], rows first_query[s] to
    first_query[s + 1].

    `lengths` [S]: number of keys per sequence; a sequence's last query is at its last key. Keys and values are [K, G,
    D] from row first_key[s] on, or [pages, page, G, D] on the pages table[s]. D must be a power of two. A query sees
    the newest `window` keys up to its own (None: all keys up to its own). Keys for which the table has no page are left
    out: when vLLM starts, it makes sequences that are longer than its table.
    `lse` [A, T] fp32, if given, receives the log-sum-exp of the scores, in nats.

    Raises ValueError for a window below 1.
    """
    if window is not None and window < 1:
        raise ValueError(
            f"window must be None or at least 1, got {window}; a query sees at least its own key"
        )
    sequences, heads, size = len(lengths), query.shape[1], query.shape[2]
    shared = heads // key.shape[-2]
    if not sequences or not most_queries:
        return out
    paged = table is not None
    rows = FEW_ROWS if most_queries * shared <= FEW_ROWS else ROWS
    page_strides = (key.stride(0), value.stride(0)) if paged else (0, 0)
    assert query.stride(2) == key.stride(-1) == value.stride(-1) == out.stride(2) == 1
    with torch.cuda.device_of(query):
        attention_kernel[(-(-most_queries * shared // rows), key.shape[-2], sequences)](
            query, key, value, out, query if lse is None else lse,
            first_query, first_query if first_key is None else first_key, lengths,
            first_query if table is None else table,
            query.stride(0), query.stride(1), page_strides[0], key.stride(-3), key.stride(-2),
            page_strides[1], value.stride(-3), value.stride(-2), out.stride(0), out.stride(1),
            0 if lse is None else lse.stride(0), 0 if table is None else table.stride(0),
            2**31 - 1 if table is None else table.shape[1] * key.shape[1], scale * LOG2_E,
            PAGE=key.shape[1] if paged else 0, SHARED=shared, SIZE=size, ROWS=rows, KEYS=KEYS,
            HAS_LSE=lse is not None, WINDOW=window or 0, num_warps=8 if rows == ROWS else 4, num_stages=3,
        )  # fmt: skip
    return out
