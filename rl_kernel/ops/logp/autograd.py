"""`logp` over the Triton kernels: one read of the logits forward, one read and one write backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import increment_version

from rl_kernel.collectives import gather_stack
from rl_kernel.kept import KeptTokens
from rl_kernel.ops.logp.kernels import keep_, logits_grad, merge, row_stats
from rl_kernel.vocab import VocabShard, take

SCRATCH_ELEMENTS = 2**25
"""Logits that are copied at a time to lay a kept set over them: 64 MiB in bfloat16."""


class Logp(torch.autograd.Function):
    """Log-probs [N] and entropy [N] (None unless asked for) of materialised logits."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        targets: Tensor,
        temperature: float | Tensor,
        shard: VocabShard,
        with_entropy: bool,
        kept: KeptTokens | None,
        in_place: bool,
    ) -> tuple[Tensor, Tensor | None]:
        inverse = 1.0 / temperature
        stats = _stats(logits, targets, inverse, shard, with_entropy, kept)
        log_probs, lse, entropy = merge(gather_stack(stats, shard.group))
        ctx.save_for_backward(logits, targets, lse, entropy)
        ctx.inverse, ctx.shard, ctx.kept, ctx.in_place = inverse, shard, kept, in_place
        ctx.set_materialize_grads(False)
        return log_probs, entropy

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_log_probs: Tensor | None, grad_entropy: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        if grad_log_probs is None and grad_entropy is None:
            return (None,) * 7
        logits, targets, lse, entropy = ctx.saved_tensors
        source = out = logits.detach()
        if not ctx.in_place:
            out = torch.empty_like(logits)
        if ctx.kept is not None:
            source = keep_(out if ctx.in_place else out.copy_(logits), ctx.kept, ctx.shard)
        upstream = grad_log_probs, grad_entropy
        logits_grad(source, targets, lse, entropy, ctx.shard, *upstream, ctx.inverse, out)
        if ctx.in_place:
            increment_version(logits)  # a second backward is an error, not a gradient of a gradient's values
        return out, None, None, None, None, None, None


def _stats(
    logits: Tensor,
    targets: Tensor,
    inverse: float | Tensor,
    shard: VocabShard,
    with_entropy: bool,
    kept: KeptTokens | None,
) -> Tensor:
    if kept is None:
        return row_stats(logits, targets, inverse, shard, with_entropy)
    stats = logits.new_empty(3 + with_entropy, len(logits), dtype=torch.float32)
    height = max(1, SCRATCH_ELEMENTS // shard.stored)
    for first in range(0, len(logits), height):
        rows = slice(first, first + height)
        tile = keep_(logits[rows].clone(), kept.rows(rows), shard)
        row_stats(tile, targets[rows], take(inverse, rows), shard, with_entropy, out=stats[:, rows])
    return stats
