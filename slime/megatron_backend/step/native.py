"""The native path (--rlk-fast off): log-probs and entropy from full logits in plain PyTorch, without rl_kernel.

Trainers commonly use this path, and every comparison uses it as the baseline: float32 logits, Megatron's
vocabulary-parallel cross entropy, and the softmax kept for the backward. R response tokens, V_local columns of this
rank.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy
from torch import Tensor

from rl_kernel.kept import KeptTokens
from rl_kernel.token_ids import Top, add_ids_grad_, gather_id_logits, largest, merge_top, top_keys, with_ids
from rl_kernel.vocab import VocabShard

EntropyUse = Literal["none", "metric", "loss"]
"""Use of the entropy: not computed; computed without a gradient; computed with a gradient."""

PADDING_LOGIT = -1e30
"""Logit of a padding column. It is finite, so that probability x log-probability of the column is 0 and not NaN."""


def mask_padding(logits: Tensor, start: int, size: int) -> Tensor:
    """Returns `logits` [R, V_local] with the padding columns of the vocabulary (ids from `size` on) set to
    PADDING_LOGIT."""
    if start + logits.shape[-1] <= size:
        return logits
    padding = torch.arange(start, start + logits.shape[-1], device=logits.device) >= size
    return logits.masked_fill(padding, PADDING_LOGIT)


def log_probs_and_entropy(
    logits: Tensor, targets: Tensor, *, temperature: float, entropy: EntropyUse
) -> tuple[Tensor, Tensor | None]:
    """Returns `log_softmax(logits / temperature, -1)[target]` [R] and the entropy [R] or None, in fp32 nats.
    Differentiable.

    `logits` [R, V_local] float32 with masked padding (`mask_padding`), split over Megatron's tensor-parallel group.
    Their memory is overwritten.
    """
    if temperature != 1:
        logits = logits / temperature
    values = None
    if entropy != "none":
        values = VocabParallelEntropy.apply(logits if entropy == "loss" else logits.detach())
    # This comes last, because Megatron subtracts the maximum in place.
    return -vocab_parallel_cross_entropy(logits[:, None], targets[:, None])[:, 0], values


def make_keep_mask(kept: KeptTokens, like: Tensor, start: int) -> Tensor:
    """Returns bool [R, V_local]: True for the columns that sampling kept. The columns are those of the logits `like`,
    from id `start` on. A token that was not truncated keeps all columns."""
    token = torch.repeat_interleave(kept.offsets.diff())
    column = kept.ids.long() - start
    here = (column >= 0) & (column < like.shape[-1])
    keep = torch.zeros_like(like, dtype=torch.bool)
    keep[token[here], column[here]] = True
    return keep | ~kept.truncated[:, None]


def cut_to(logits: Tensor, keep: Tensor) -> Tensor:
    """Returns a copy of `logits` [R, V_local] with PADDING_LOGIT where `keep` is False."""
    return logits.masked_fill(~keep, PADDING_LOGIT)


def entropies(logits: Tensor, *, temperature: float, entropy: EntropyUse) -> Tensor | None:
    """Returns the entropy [R] of `softmax(logits / temperature)`, as `log_probs_and_entropy` computes it."""
    if entropy == "none":
        return None
    logits = logits / temperature
    found: Tensor = VocabParallelEntropy.apply(logits if entropy == "loss" else logits.detach())
    return found


def ids_log_probs(logits: Tensor, ids: Tensor, start: int, size: int) -> Tensor:
    """Returns `log_softmax(logits, -1).gather(1, ids)` [R, K] over the tensor-parallel group; -inf for `NONE`.
    Differentiable.

    `logits` [R, V_local] float32 from id `start` on, divided by the temperature, with masked padding; `size` ids.
    """
    found: Tensor = VocabParallelIds.apply(logits, ids, _shard(logits, start, size))
    return found


def compute_top(logits: Tensor, start: int, size: int, count: int) -> Top:
    """Returns the ids of the `count` largest log-probs, over the tensor-parallel group; `logits` as in
    `ids_log_probs`."""
    shard = _shard(logits, start, size)
    keys = top_keys(logits[:, : shard.real], shard, count)
    return merge_top(keys, _log_sum_exp(logits, shard), count, shard.group)


def _shard(logits: Tensor, start: int, size: int) -> VocabShard:
    group = parallel_state.get_tensor_model_parallel_group()
    return VocabShard(start, logits.shape[1], size, group, max(size, start + logits.shape[1]))


def _log_sum_exp(logits: Tensor, shard: VocabShard) -> Tensor:
    top = logits.amax(-1)
    dist.all_reduce(top, op=dist.ReduceOp.MAX, group=shard.group)
    total = (logits - top[:, None]).exp().sum(-1)
    dist.all_reduce(total, group=shard.group)
    return top + total.log()


class VocabParallelIds(torch.autograd.Function):
    """Autograd function `logits.gather(1, ids) - logsumexp(logits)` over the tensor-parallel group."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, ids: Tensor, shard: VocabShard) -> Tensor:
        lse = _log_sum_exp(logits, shard)
        ctx.save_for_backward(logits, ids, lse)
        ctx.shard = shard
        found = gather_id_logits(logits, ids, shard)
        assert found is not None
        return largest(found, shard.group).sub_(lse[:, None])

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None, None]:
        logits, ids, lse = ctx.saved_tensors
        total, of_ids = with_ids(None, upstream, ids, ctx.shard)
        assert total is not None
        gradient = (logits - lse[:, None]).exp() * -total[:, None]
        nobody = torch.full_like(lse, -1, dtype=torch.int64)
        return add_ids_grad_(gradient, nobody, ids, of_ids, ctx.shard), None, None


class VocabParallelEntropy(torch.autograd.Function):
    """Autograd function `logsumexp(z) - (softmax(z) * z).sum(-1)` over the tensor-parallel group. Saves the softmax.
    The gradient is `-p * (log p + entropy)`."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        group = parallel_state.get_tensor_model_parallel_group()
        top = logits.amax(-1, keepdim=True)
        dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group)
        shifted = logits - top
        exp = shifted.exp()
        sums = torch.stack([exp.sum(-1), (exp * shifted).sum(-1)])
        dist.all_reduce(sums, group=group)
        entropy = sums[0].log() - sums[1] / sums[0]
        log_p = shifted.sub_(sums[0].log()[:, None])
        ctx.save_for_backward(exp.div_(sums[0][:, None]), log_p, entropy)
        return entropy

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> Tensor:
        softmax, log_p, entropy = ctx.saved_tensors
        gradient: Tensor = -upstream[:, None] * softmax * (log_p + entropy[:, None])
        return gradient
