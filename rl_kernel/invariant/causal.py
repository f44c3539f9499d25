"""Causal attention of a query over its keys, with the same bits in any batch, padding and chunk. Hosts compute in
float32.

S sequences, A query heads, G key heads, Q queries and K keys of a sequence with padding, D head size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from rl_kernel.invariant import exact
from rl_kernel.invariant.autograd import with_plain_gradient

_SCORES = 2**21
"""Number of scores in one piece of queries. The scores of a piece are in memory at once, with some copies."""


def attention(query: Tensor, key: Tensor, value: Tensor, seen: Tensor, scale: float) -> Tensor:
    """Computes `softmax(query @ key.mT * scale, where seen) @ value` with grouped heads.

    query [S, A, Q, D], key and value [S, G, K, D] -> [S, A, Q, D] in the dtype of query. `seen` [S, 1, Q, K] bool is
    True for the keys that a query sees. A query that sees no key gets 0. Keys that no query sees may hold any finite
    number.

    A query's result depends only on the query and on the keys and values that it sees. Scores and outputs are exact
    sums of products of slices (`exact.product`). The denominator is an exact sum of fractions. The largest element of a
    value row scales the slices of the row. Differentiable in query, key and value.
    """

    def by_pieces(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        rows = max(1, _SCORES // (query.shape[0] * query.shape[1] * key.shape[2]))
        pieces = zip(query.split(rows, 2), seen.split(rows, 2), strict=True)
        return torch.cat([_exactly(piece, key, value, mask, scale) for piece, mask in pieces], 2)

    def plain(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        # a query that sees no key has no gradient, but a softmax over an empty set is NaN
        some = seen | ~seen.any(-1, keepdim=True)
        return scaled_dot_product_attention(query, key, value, some, scale=scale, enable_gqa=True)

    return with_plain_gradient(plain, by_pieces, query, key, value)


def packed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    first_query: Tensor,
    first_key: Tensor,
    most_queries: int,
    most_keys: int,
    scale: float,
    window: int | None = None,
) -> Tensor:
    """Computes causal attention of packed sequences on a GPU: query [T, A, D], key and value [K, G, D] -> [T, A, D].
    `first_query` and `first_key` [S + 1] int32 bound the sequences. A sequence's last query is at its last key.
    `most_queries` and `most_keys` are the lengths of the longest sequence. A query sees the newest `window` keys up to
    its own (None: all keys up to its own).

    A query has the bits of `paged_attention`, for any position in the batch and any other sequences. Differentiable in
    query, key and value, by the backward of torch's flash attention from this output and its log-sum-exp.
    """
    bounds = (first_query, first_key, most_queries, most_keys)
    out: Tensor = _Packed.apply(
        *(x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value)), bounds, scale, window
    )
    return out


class _Packed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        bounds: tuple[Tensor, Tensor, int, int],
        scale: float,
        window: int | None,
    ) -> Tensor:
        from rl_kernel.invariant import kernels

        first_query, first_key, most_queries, most_keys = bounds
        out = query.new_empty(query.shape)
        lse = query.new_empty(query.shape[1], len(query), dtype=torch.float32)
        kernels.attention(
            query,
            key,
            value,
            out,
            first_query,
            first_key.diff(),
            most_queries,
            scale,
            first_key=first_key,
            lse=lse,
            window=window,
        )
        ctx.save_for_backward(query, key, value, out, lse, first_query, first_key)
        ctx.longest, ctx.scale, ctx.window = (most_queries, most_keys), scale, window
        return out

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse, first_query, first_key = ctx.saved_tensors
        seed = torch.zeros(2, dtype=torch.uint64, device=query.device)  # the seed of dropout, which is off
        causal = ctx.window is None  # a window with no key to the right is causal without the flag
        gradients = torch.ops.aten._flash_attention_backward(
            *(upstream.contiguous(), query, key, value, out, lse, first_query, first_key, *ctx.longest),
            *(0.0, causal, seed, seed),
            scale=ctx.scale,
            window_size_left=-1 if ctx.window is None else ctx.window - 1,
            window_size_right=0,
        )
        return *gradients, None, None, None


def paged_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    table: Tensor,
    first_query: Tensor,
    lengths: Tensor,
    most_queries: int,
    scale: float,
    window: int | None = None,
) -> Tensor:
    """Computes `packed_attention` into `out`. The keys and values [pages, page, G, D] of sequence s are on the pages
    table[s]. `lengths` [S] int32 is the number of keys per sequence. Pages before every window are not read."""
    from rl_kernel.invariant import kernels

    return kernels.attention(
        query, key, value, out, first_query, lengths, most_queries, scale, table=table, window=window
    )


def _exactly(query: Tensor, key: Tensor, value: Tensor, seen: Tensor, scale: float) -> Tensor:
    shared = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(shared, 1) for x in (key, value))
    scores = (exact.product(query, key) * scale).masked_fill(~seen, -torch.inf)
    top = scores.amax(-1, keepdim=True)
    top = torch.where(top == -torch.inf, torch.zeros_like(top), top)
    shares = exact.exp(scores - top)
    total = exact.sum_fractions(shares)[..., None]
    # The scale of a value is multiplied into its share, so that no slice depends on keys that this query does not see.
    value_exponents = exact.exponents(value)
    unit = value.double() * exact.power_of_two(-value_exponents)
    weighed = shares * exact.power_of_two(value_exponents).mT
    out = exact.product(weighed, unit.mT, torch.zeros_like(unit[..., :1, :]).mT.to(torch.int64))
    return torch.where(total > 0, out / total.clamp(min=2.0**-exact.FRACTION_BITS), 0.0).to(query.dtype)
