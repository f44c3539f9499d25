"""Attention whose softmax is not the usual one: learned sinks (gpt-oss) and capped scores (Gemma 2).

A sink is one learned score per head in the softmax, whose share goes to no token: `softmax([scores, sink])[:-1] @ v`.
A cap makes scores z `cap * tanh(z / cap)`. On GPUs in half precision, sinks run on torch's flash kernel. Caps run in
plain PyTorch on every device, which is correct and slow: it keeps all scores of a sequence.

Shapes: S sequences of L tokens, T packed tokens, A query heads, G key/value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Inner = Callable[[Tensor, Tensor, Tensor, Tensor, float], Tensor]
"""(q [S, A, queries, D], k and v [S, G, keys, D], seen bool [S, 1, queries, keys], scale) -> [S, A, queries, D]."""


def plain_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, cap: float | None, sinks: Tensor | None
) -> Tensor:
    """q [S, A, L, D], k and v [S, G, L, D], mask bool [L, L], sinks [A] -> [S, A, L, D]. The softmax is in fp32."""
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


class SinkAttention(torch.autograd.Function):
    """torch's flash attention over packed sequences with sinks [A]: q [n, A, D], k and v [K, G, D] -> [n, A, D].

    `bounds` are (first rows of the queries, first rows of the keys, most queries, most keys) of the sequences. With
    `z = logaddexp(lse, sink)`, the output is the kernel's output times `exp(lse - z)`. The kernel's backward is right
    for it if it gets that output and z in place of its own output and lse. The gradient of a sink is
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
