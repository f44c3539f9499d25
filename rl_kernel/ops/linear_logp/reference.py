"""`linear_logp` in plain PyTorch: the definition of correct.

Works through the tokens a tile at a time, so `[N, V]` is never held. The backward computes each tile's logits
again, unless all of them are small (KEPT_ELEMENTS). Legend: N tokens, H hidden, V local columns without
padding.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from rl_kernel.checks import compute_dtype
from rl_kernel.kept import KeptTokens, kept_grad, kept_stats, stats_count
from rl_kernel.vocab import VocabShard, merge_stats, row_tiles, scale_, take

KEPT_ELEMENTS = 2**22
"""Logits of one call that are kept for the backward (16 MiB in float32); more are computed again."""


def tile_logits(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    temperature: float | Tensor,
    rounding: torch.dtype | None,
) -> Tensor:
    """Logits [C, V] of a tile: rounded to `rounding`, then divided by the temperature."""
    hidden = hidden.to(weight.dtype)
    logits = hidden @ weight.t() if bias is None else torch.addmm(bias, hidden, weight.t())
    if rounding is not None:
        logits = logits.to(rounding).to(weight.dtype)
    return scale_(logits, temperature)


class LinearLogp(torch.autograd.Function):
    """Log-probs [N] and entropy [N] (None unless asked for) of `hidden @ weight.T + bias`."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float | Tensor,
        shard: VocabShard,
        rounding: torch.dtype | None,
        keep_mask: KeptTokens | None,
        with_entropy: bool,
    ) -> tuple[Tensor, Tensor | None]:
        dtype = compute_dtype(hidden, weight, bias)
        wide, wide_bias = _real_columns(weight, bias, shard, dtype)
        stats = wide.new_empty(stats_count(with_entropy, keep_mask), len(hidden))
        keep = len(hidden) * shard.real <= KEPT_ELEMENTS
        kept = []
        for rows in row_tiles(len(hidden), shard.real):
            logits = tile_logits(hidden[rows], wide, wide_bias, take(temperature, rows), rounding)
            stats[:, rows] = kept_stats(logits, targets[rows], shard, with_entropy, take(keep_mask, rows))
            if keep:
                kept.append(logits)
        log_probs, lse, entropy, whole_lse = merge_stats(stats, targets, shard)
        ctx.save_for_backward(hidden, weight, bias, targets, lse, whole_lse, entropy, *kept)
        ctx.temperature, ctx.shard, ctx.rounding, ctx.keep_mask = temperature, shard, rounding, keep_mask
        ctx.set_materialize_grads(False)
        return log_probs, entropy

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_log_probs: Tensor | None, grad_entropy: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, lse, whole_lse, entropy, *kept = ctx.saved_tensors
        if grad_log_probs is None and grad_entropy is None:
            return (None,) * 9
        shard, temperature = ctx.shard, ctx.temperature
        wide, wide_bias = _real_columns(weight, bias, shard, lse.dtype)
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        d_hidden = lse.new_empty(hidden.shape) if need_hidden else None
        d_weight = lse.new_zeros(weight.shape) if need_weight else None
        d_bias = lse.new_zeros(bias.shape) if need_bias else None
        for index, rows in enumerate(row_tiles(len(hidden), shard.real)):
            at = take(temperature, rows)
            logits = kept[index] if kept else tile_logits(hidden[rows], wide, wide_bias, at, ctx.rounding)
            by_token = targets[rows], lse[rows], whole_lse[rows], take(entropy, rows)
            upstream = take(grad_log_probs, rows), take(grad_entropy, rows)
            d_logits = kept_grad(logits, *by_token, shard, take(ctx.keep_mask, rows), *upstream)
            scale_(d_logits, at)
            if d_hidden is not None:
                torch.mm(d_logits, wide, out=d_hidden[rows])
            if d_weight is not None:
                d_weight[: shard.real].addmm_(d_logits.t(), hidden[rows].to(lse.dtype))
            if d_bias is not None:
                d_bias[: shard.real] += d_logits.sum(0)
        if d_hidden is not None:
            if shard.group is not None and d_hidden.numel():
                # Each rank saw only its columns; the sum is the whole gradient.
                dist.all_reduce(d_hidden, group=shard.group)
            d_hidden = d_hidden.to(hidden.dtype)
        if d_weight is not None:
            d_weight = d_weight.to(weight.dtype)
        if d_bias is not None:
            d_bias = d_bias.to(bias.dtype)
        return d_hidden, d_weight, d_bias, None, None, None, None, None, None


def _real_columns(
    weight: Tensor, bias: Tensor | None, shard: VocabShard, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    """Weight [V, H] and bias [V] without the padding, in the compute dtype."""
    real = shard.real
    return weight[:real].to(dtype), None if bias is None else bias[:real].to(dtype)
