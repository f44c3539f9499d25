"""Attention over one padded bucket, and attention with a special softmax: learned sinks (gpt-oss) and capped scores
(Gemma 2).

A sink is one learned score per head in the softmax, whose share goes to no token: `softmax([scores, sink])[:-1] @ v`. A
cap makes scores z `cap * tanh(z / cap)`. On GPUs in half precision, sinks run on torch's flash kernel. Caps run in
plain PyTorch on every device, which is correct and slow: it keeps all scores of a sequence.

Shapes: S sequences of L tokens, T packed tokens, A query heads, G key/value heads, D head size.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

Inner = Callable[[Tensor, Tensor, Tensor, Tensor, float], Tensor]
"""Maps (q [S, A, queries, D], k and v [S, G, keys, D], seen bool [S, 1, queries, keys], scale) to [S, A, queries,
D]."""


class Bucket(NamedTuple):
    """A padded batch of runs: `runs` S, `queries` and `keys` per run with padding. `mask` [S, 1, queries, keys] is True
    for the keys that a query sees. None means a causal mask over equally many queries and keys."""

    runs: int
    queries: int
    keys: int
    mask: Tensor | None = None


def split_buckets(x: Tensor, slots: Tensor, sizes: Sequence[tuple[int, int]]) -> list[Tensor]:
    """Maps rows [rows, heads, D] to padded batches [S, heads, L, D]. `sizes` are (S, L) of each batch, and `slots` the
    positions of the rows in all batches. Padding is 0."""
    buffer = x.new_zeros(sum(runs * length for runs, length in sizes), *x.shape[1:]).index_copy(0, slots, x)
    parts = buffer.split([runs * length for runs, length in sizes])
    return [part.unflatten(0, size).transpose(1, 2) for part, size in zip(parts, sizes, strict=True)]


def bucket_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Computes q [S, A, queries, D], k and v [S, G, keys, D] -> [S, A, queries, D]. Without a mask the attention is
    causal."""
    shared = q.shape[1] // k.shape[1]
    if mask is None or mask.dim() == 2:
        return scaled_dot_product_attention(
            q, k, v, mask, is_causal=mask is None, scale=scale, enable_gqa=shared > 1
        )
    # The heads of a group become more queries: for few queries on CPUs, a third faster than `enable_gqa`.
    folded = q.unflatten(1, (-1, shared)).flatten(2, 3)
    out = scaled_dot_product_attention(folded, k, v, mask.repeat(1, 1, shared, 1), scale=scale)
    unfolded: Tensor = out.unflatten(2, (shared, -1))
    return unfolded.flatten(1, 2)


def bucket_mask(bucket: Bucket, window: int | None, device: torch.device) -> Tensor | None:
    """Returns the keys that the queries of a bucket see: [S, 1, queries, keys], or [keys, keys] if the bucket has no
    mask. None means a causal mask."""
    if window is None or window >= bucket.keys:
        return bucket.mask
    if bucket.mask is None:
        return band(bucket.keys, window, device)
    index = bucket.mask.sum(-1, keepdim=True) - 1  # index of a query among its keys; it sees keys up to here
    near: Tensor = torch.arange(bucket.keys, device=device) > index - window
    return bucket.mask & near


def band(length: int, window: int, device: torch.device) -> Tensor:
    """Returns a mask [L, L]: query i sees keys i - window + 1 to i."""
    distance = torch.arange(length, device=device)[:, None] - torch.arange(length, device=device)
    return (distance >= 0) & (distance < window)


def plain_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, cap: float | None, sinks: Tensor | None
) -> Tensor:
    """Computes q [S, A, L, D], k and v [S, G, L, D], mask bool [L, L], sinks [A] -> [S, A, L, D]. The softmax is in
    fp32."""
    repeats = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeats, dim=1), v.repeat_interleave(repeats, dim=1)
    scores = (q @ k.transpose(-1, -2)).float() * scale
    if cap is not None:
        scores = cap * torch.tanh(scores / cap)
    scores = scores.masked_fill(~mask, -torch.inf)
    if sinks is not None:
        column = sinks.float().view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, column], dim=-1)
    shares = scores.softmax(-1)[..., : k.shape[2]]
    return shares.to(v.dtype) @ v


@functools.cache
def varlen_attention() -> Callable[..., Any]:
    """Returns torch's variable-length kernel with grouped heads. The import is in the function, because it imports the
    compiler."""
    from torch.nn.attention.varlen import varlen_attn

    # torch 2.11 groups heads without this argument; later releases need it
    needs_it = "enable_gqa" in inspect.signature(varlen_attn).parameters
    return functools.partial(varlen_attn, enable_gqa=True) if needs_it else varlen_attn


class SinkAttention(torch.autograd.Function):
    """torch's flash attention over packed sequences with sinks [A]: q [n, A, D], k and v [K, G, D] -> [n, A, D].

    `bounds` are (first rows of the queries, first rows of the keys, most queries, most keys) of the sequences. With `z
    = logaddexp(lse, sink)`, the output is the kernel's output times `exp(lse - z)`. The kernel's backward is correct
    for this output if it gets this output and z instead of the kernel's output and lse. The gradient of a sink is
    `-(exp(sink - z) * (output * d_output).sum(-1)).sum()`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor,
        bounds: tuple[Tensor, Tensor, int, int],
        scale: float,
        window: int | None,
    ) -> Tensor:
        ctx.settings = {
            "scale": scale,
            "window_size_left": -1 if window is None else window - 1,
            "window_size_right": 0,
        }
        ctx.causal = window is None
        plain, lse, rng, unused, _ = torch.ops.aten._flash_attention_forward(
            q, k, v, *bounds, 0.0, ctx.causal, False, **ctx.settings
        )
        z = torch.logaddexp(lse, sinks.float()[:, None])
        out: Tensor = (plain * (lse - z).exp().T[..., None]).to(q.dtype)
        ctx.save_for_backward(q, k, v, sinks, out, z, rng, unused, *bounds[:2])
        ctx.longest = bounds[2:]
        return out

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, out, z, rng, unused, first_q, first_k = ctx.saved_tensors
        upstream = upstream.contiguous()
        d_q, d_k, d_v = torch.ops.aten._flash_attention_backward(
            *(upstream, q, k, v, out, z, first_q, first_k, *ctx.longest, 0.0, ctx.causal, rng, unused),
            **ctx.settings,
        )
        of_rows = (out.float() * upstream.float()).sum(-1).T
        d_sinks = -((sinks.float()[:, None] - z).exp() * of_rows).sum(-1)
        return d_q, d_k, d_v, d_sinks.to(sinks.dtype), None, None, None
