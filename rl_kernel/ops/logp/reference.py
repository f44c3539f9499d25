"""`logp` in plain PyTorch, the definition of correct, and the record of a call.

The reference goes through the rows tile by tile, so that it makes no float32 copy of the whole logits.

Legend: N tokens, V columns of this process.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rl_kernel.autograd import Context
from rl_kernel.checks import compute_dtype
from rl_kernel.kept import KeptTokens, kept_grad, kept_stats, stats_count
from rl_kernel.vocab import VocabShard, cap_slope_, capped, merge_stats, row_tiles, scale_, take


@dataclass(frozen=True)
class LogpTask:
    """The computation that one call requests from logits and targets. `temperature`: a positive number or [N], in the
    compute dtype. `keep`: the ids that top-p or top-k sampling kept. `in_place`: the backward overwrites the logits.
    `cap`: the soft cap of the logits."""

    temperature: float | Tensor
    shard: VocabShard
    with_entropy: bool
    keep: KeptTokens | None
    in_place: bool
    cap: float | None = None


def tile_logits(logits: Tensor, rows: slice, task: LogpTask) -> Tensor:
    """Returns a copy [C, V] of `rows`, capped and divided by the temperature, without the padding, in the compute
    dtype."""
    tile = capped(logits[rows, : task.shard.real], task.cap).to(compute_dtype(logits), copy=task.cap is None)
    return scale_(tile, take(task.temperature, rows))


class LogpContext(Context, Protocol):
    task: LogpTask


class Logp(torch.autograd.Function):
    """Autograd function for log-probs [N] and entropy [N] of materialised logits. The entropy is None unless
    requested."""

    @staticmethod
    def forward(
        ctx: LogpContext, logits: Tensor, targets: Tensor, task: LogpTask
    ) -> tuple[Tensor, Tensor | None]:
        shard, with_entropy, keep = task.shard, task.with_entropy, task.keep
        stats = logits.new_empty(stats_count(with_entropy, keep), len(logits), dtype=compute_dtype(logits))
        for rows in row_tiles(len(logits), shard.real):
            tile = tile_logits(logits, rows, task)
            stats[:, rows] = kept_stats(tile, targets[rows], shard, with_entropy, take(keep, rows))
        log_probs, lse, entropy, whole_lse = merge_stats(stats, targets, shard)
        ctx.save_for_backward(logits, targets, lse, whole_lse, entropy)
        ctx.task = task
        ctx.set_materialize_grads(False)
        return log_probs, entropy

    @staticmethod
    @once_differentiable
    def backward(
        ctx: LogpContext, grad_log_probs: Tensor | None, grad_entropy: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        if grad_log_probs is None and grad_entropy is None:
            return (None,) * 3
        logits, targets, lse, whole_lse, entropy = ctx.saved_tensors
        shard, temperature = ctx.task.shard, ctx.task.temperature
        d_logits = logits.detach() if ctx.task.in_place else torch.empty_like(logits)
        d_logits[:, shard.real :] = 0
        for rows in row_tiles(len(logits), shard.real):
            tile = tile_logits(logits, rows, ctx.task)
            by_token = targets[rows], lse[rows], whole_lse[rows], take(entropy, rows)
            upstream = take(grad_log_probs, rows), take(grad_entropy, rows)
            d_tile = kept_grad(tile, *by_token, shard, take(ctx.task.keep, rows), *upstream)
            at = take(temperature, rows)
            d_logits[rows, : shard.real] = scale_(cap_slope_(d_tile, tile, at, ctx.task.cap), at)
        return d_logits, None, None
