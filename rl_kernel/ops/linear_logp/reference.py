"""`linear_logp` in plain PyTorch: the definition of correct.

The reference goes through the tokens tile by tile, so that `[N, V]` is never in memory. The backward computes
each tile's logits again, unless the call has few logits (KEPT_ELEMENTS).

Legend: N tokens, H hidden, V columns of this process without padding, C tokens of a tile.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from rl_kernel.autograd import Context, in_own_dtypes
from rl_kernel.checks import compute_dtype
from rl_kernel.kept import kept_grad, kept_stats, stats_count
from rl_kernel.ops.linear_logp.arguments import Task
from rl_kernel.token_ids import (
    Top,
    add_ids_grad_,
    gather_id_logits,
    ids_log_probs,
    merge_top,
    top_keys,
    with_ids,
)
from rl_kernel.vocab import (
    VocabShard,
    cap_slope_,
    capped,
    merge_stats,
    row_tiles,
    scale_,
    take,
    usable_temperature,
)

KEPT_ELEMENTS = 2**22
"""A call with at most this many logits keeps them for the backward (16 MiB in float32)."""


def tile_logits(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    temperature: float | Tensor,
    task: Task,
) -> Tensor:
    """Returns the logits [C, V] of a tile: rounded and capped, then divided by the temperature."""
    hidden = hidden.to(weight.dtype)
    logits = hidden @ weight.t() if bias is None else torch.addmm(bias, hidden, weight.t())
    if task.rounding is not None:
        logits = logits.to(task.rounding)
    return scale_(capped(logits, task.cap).to(weight.dtype), temperature)


class LinearContext(Context, Protocol):
    task: Task
    temperature: float | Tensor


class LinearLogp(torch.autograd.Function):
    """Autograd function for log-probs [N], entropy [N] and log-probs of the ids [N, K] of `hidden @ weight.T + bias`.
    The last two are None unless requested."""

    @staticmethod
    @in_own_dtypes
    def forward(
        ctx: LinearContext, hidden: Tensor, weight: Tensor, bias: Tensor | None, task: Task
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        dtype = compute_dtype(hidden, weight, bias)
        temperature = usable_temperature(task.temperature, dtype)
        targets, shard, keep, with_entropy = task.targets, task.shard, task.keep, task.with_entropy
        wide, wide_bias = _real_columns(weight, bias, shard, dtype)
        stats = wide.new_empty(stats_count(with_entropy, keep), len(hidden))
        picked = []
        keeps_logits = len(hidden) * shard.real <= KEPT_ELEMENTS
        kept = []
        for rows in row_tiles(len(hidden), shard.real):
            logits = tile_logits(hidden[rows], wide, wide_bias, take(temperature, rows), task)
            stats[:, rows] = kept_stats(logits, targets[rows], shard, with_entropy, take(keep, rows))
            picked.append(gather_id_logits(logits, take(task.ids, rows), shard))
            if keeps_logits:
                kept.append(logits)
        log_probs, lse, entropy, whole_lse = merge_stats(stats, targets, shard)
        id_log_probs = ids_log_probs(task.ids, picked, whole_lse, shard)
        ctx.save_for_backward(hidden, weight, bias, lse, whole_lse, entropy, *kept)
        ctx.task, ctx.temperature = task, temperature
        ctx.set_materialize_grads(False)
        return log_probs, entropy, id_log_probs

    @staticmethod
    @in_own_dtypes
    @once_differentiable
    def backward(
        ctx: LinearContext,
        grad_log_probs: Tensor | None,
        grad_entropy: Tensor | None,
        grad_ids: Tensor | None,
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, lse, whole_lse, entropy, *kept = ctx.saved_tensors
        if grad_log_probs is None and grad_entropy is None and grad_ids is None:
            return (None,) * 4
        task, temperature = ctx.task, ctx.temperature
        shard = task.shard
        grad_log_probs, grad_ids = with_ids(grad_log_probs, grad_ids, task.ids, shard)
        wide, wide_bias = _real_columns(weight, bias, shard, lse.dtype)
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        d_hidden = lse.new_empty(hidden.shape) if need_hidden else None
        d_weight = lse.new_zeros(weight.shape) if need_weight else None
        d_bias = lse.new_zeros(bias.shape) if need_bias else None
        for index, rows in enumerate(row_tiles(len(hidden), shard.real)):
            at = take(temperature, rows)
            logits = kept[index] if kept else tile_logits(hidden[rows], wide, wide_bias, at, task)
            by_token = task.targets[rows], lse[rows], whole_lse[rows], take(entropy, rows)
            upstream = take(grad_log_probs, rows), take(grad_entropy, rows)
            d_logits = kept_grad(logits, *by_token, shard, take(task.keep, rows), *upstream)
            add_ids_grad_(d_logits, task.targets[rows], take(task.ids, rows), take(grad_ids, rows), shard)
            scale_(cap_slope_(d_logits, logits, at, task.cap), at)
            if d_hidden is not None:
                torch.mm(d_logits, wide, out=d_hidden[rows])
            if d_weight is not None:
                d_weight[: shard.real].addmm_(d_logits.t(), hidden[rows].to(lse.dtype))
            if d_bias is not None:
                d_bias[: shard.real] += d_logits.sum(0)
        if d_hidden is not None:
            if shard.group is not None and d_hidden.numel():
                # Each rank has the part that belongs to its own columns; the sum is the whole gradient.
                dist.all_reduce(d_hidden, group=shard.group)
            d_hidden = d_hidden.to(hidden.dtype)
        if d_weight is not None:
            d_weight = d_weight.to(weight.dtype)
        if d_bias is not None:
            d_bias = d_bias.to(bias.dtype)
        return d_hidden, d_weight, d_bias, None


@in_own_dtypes
@torch.no_grad()
def linear_top_reference(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, task: Task
) -> tuple[Tensor, Top]:
    """Returns the log-probs [N] of the targets, and the `task.top` largest log-probs per token."""
    dtype, shard = compute_dtype(hidden, weight, bias), task.shard
    temperature = usable_temperature(task.temperature, dtype)
    wide, wide_bias = _real_columns(weight, bias, shard, dtype)
    stats = wide.new_empty(stats_count(False, None), len(hidden))
    found = []
    for rows in row_tiles(len(hidden), shard.real):
        logits = tile_logits(hidden[rows], wide, wide_bias, take(temperature, rows), task)
        stats[:, rows] = kept_stats(logits, task.targets[rows], shard, False, None)
        found.append(top_keys(logits, shard, task.top))
    log_probs, lse, _, _ = merge_stats(stats, task.targets, shard)
    keys = torch.cat(found) if found else stats.new_empty(0, min(task.top, shard.real), dtype=torch.int64)
    return log_probs, merge_top(keys, lse.float(), task.top, shard.group)


def _real_columns(
    weight: Tensor, bias: Tensor | None, shard: VocabShard, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    """Returns weight [V, H] and bias [V] without the padding, in the compute dtype."""
    real = shard.real
    return weight[:real].to(dtype), None if bias is None else bias[:real].to(dtype)
