"""`logp` over the Triton kernels: one read of the logits forward, one read and one write backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import increment_version

from rl_kernel.collectives import gather_stack
from rl_kernel.kept import KeptTokens
from rl_kernel.ops.logp.kept_kernels import kept_logits_grad, merge_kept, no_logits, pick_
from rl_kernel.ops.logp.kernels import logits_grad, merge, row_stats
from rl_kernel.telemetry import timed
from rl_kernel.vocab import VocabShard


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
        stats = row_stats(logits, targets, inverse, shard, with_entropy)
        if kept is None:
            log_probs, lse, entropy = merge(gather_stack(stats, shard.group))
            whole_lse = z = None
        else:
            z = pick_(no_logits(kept, logits), logits, kept, inverse, shard)
            log_probs, lse, entropy, whole_lse = merge_kept(stats[None], z, kept, targets, shard)
        ctx.save_for_backward(logits, targets, lse, entropy, whole_lse, z)
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
        logits, targets, lse, entropy, whole_lse, z = ctx.saved_tensors
        source = logits.detach()
        out = source if ctx.in_place else torch.empty_like(logits)
        into = ctx.shard, grad_log_probs, grad_entropy, ctx.inverse, out
        with timed("logp", logits.device):
            if ctx.kept is None:
                logits_grad(source, targets, lse, entropy, *into)
            else:
                kept_logits_grad(source, z, ctx.kept, targets, lse, whole_lse, entropy, *into)
        if ctx.in_place:
            increment_version(logits)  # a second backward is an error, not a gradient of a gradient's values
        return out, None, None, None, None, None, None
