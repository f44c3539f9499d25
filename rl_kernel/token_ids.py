"""Log-probs of given ids in addition to the target's, and the ids of the largest log-probs: checks and plain PyTorch.

If the vocabulary is split, every process gets all ids and uses the ids in its columns.

Legend: N tokens, K ids of a token, C tokens of a tile, V columns of a tile, P processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from rl_kernel.checks import INTEGERS, check_tensor, invalid
from rl_kernel.collectives import gather_stack
from rl_kernel.mode import reads_values
from rl_kernel.vocab import VocabShard

NONE = -1
"""The value that marks a missing id. Its log-prob is -inf and has no gradient."""


class Top(NamedTuple):
    """The K ids of the largest log-probs, largest first; equal log-probs are ordered by id, lowest first. `ids` [N, K]
    int32, `log_probs` [N, K] float32. `NONE` and -inf fill the end where the vocabulary has fewer than K ids."""

    ids: Tensor
    log_probs: Tensor


def check_ids(ids: Tensor | None, tokens: int, device: torch.device, limit: int) -> None:
    """Checks shape, dtype and device. If values may be read, the function also checks that the ids of a token differ
    and are `NONE` or in [0, limit). If values are not read, any other id counts as `NONE`, and only one of two equal
    ids gets its gradient."""
    if ids is None:
        return
    check_tensor("ids", ids, [tokens, "K"], INTEGERS, device=device)
    if not ids.numel() or not reads_values(ids):
        return
    low, high = (int(bound) for bound in torch.aminmax(ids))
    if low < NONE or high >= limit:
        got = f"values from {low} to {high}"
        raise invalid("ids", f"be {NONE} or lie in [0, {limit})", got, "give ids of the whole vocabulary")
    ordered = ids.sort(1).values
    again = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] != NONE)
    if again.any():
        row, column = (int(x) for x in again.nonzero()[0])
        raise invalid(
            "ids", "differ for a token", f"{int(ordered[row, column])} twice for token {row}", "drop one"
        )


def gather_id_logits(tile: Tensor, ids: Tensor | None, shard: VocabShard) -> Tensor | None:
    """Returns the logits of the ids [C, K] from a tile [C, V] of this shard's columns. The value is -inf for `NONE`,
    for padding and for other processes' ids. Returns None without ids."""
    if ids is None:
        return None
    column = ids.long() - shard.start
    here = (column >= 0) & (column < tile.shape[1])
    if tile.shape[1] == 0:
        return tile.new_full(ids.shape, -torch.inf)
    return tile.gather(1, torch.where(here, column, 0)).masked_fill(~here, -torch.inf)


def largest(logits: Tensor, group: ProcessGroup | None) -> Tensor:
    """Returns the logits of the ids [N, K] on every process. Each id's logit is finite on one process and -inf on the
    others. Runs one all-reduce, in place."""
    if group is not None and logits.numel():
        torch.distributed.all_reduce(logits, op=torch.distributed.ReduceOp.MAX, group=group)
    return logits


def ids_log_probs(
    ids: Tensor | None, parts: Sequence[Tensor | None], lse: Tensor, shard: VocabShard
) -> Tensor | None:
    """Returns the log-probs of the ids [N, K] from the logits of this process's tiles and the log-sum-exp [N], or None
    without ids. Runs one all-reduce."""
    if ids is None:
        return None
    known = [part for part in parts if part is not None]
    return largest(torch.cat(known) if known else lse.new_empty(ids.shape), shard.group).sub_(lse[:, None])


def with_ids(
    grad: Tensor | None, grad_ids: Tensor | None, ids: Tensor | None, shard: VocabShard
) -> tuple[Tensor | None, Tensor | None]:
    """Returns the upstream gradient [N] that every column gets for the target and the ids together, and the upstream
    gradient of the ids [N, K], 0 where an id is missing."""
    if grad_ids is None or ids is None:
        return grad, None
    grad_ids = torch.where((ids >= 0) & (ids < shard.limit), grad_ids, 0)
    total = grad_ids.sum(1)
    return total if grad is None else grad + total, grad_ids


def add_ids_grad_(
    d_logits: Tensor, targets: Tensor, ids: Tensor | None, grad: Tensor | None, shard: VocabShard
) -> Tensor:
    """Corrects the gradient [C, V] in place. On entry it belongs to an upstream gradient `g + grad.sum(1)` of the
    target's log-prob. On return it belongs to g of the target's log-prob and `grad` [C, K] of the ids' log-probs."""
    if ids is None or grad is None or d_logits.shape[1] == 0:
        return d_logits
    for tokens, values in ((targets[:, None], -grad.sum(1, keepdim=True)), (ids, grad)):
        column = tokens.long() - shard.start
        here = (column >= 0) & (column < d_logits.shape[1])
        # The ids of a token differ, and other ids add 0: the order of the additions makes no difference.
        d_logits.scatter_add_(1, torch.where(here, column, 0), torch.where(here, values, 0))
    return d_logits


def sort_keys(values: Tensor, ids: Tensor) -> Tensor:
    """Returns int64 keys that order by the float32 value, then by the lower id first."""
    bits = values.float().view(torch.int32)
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()
    return (ordered << 32) | (0x7FFFFFFF - ids.long())


def split_keys(keys: Tensor) -> tuple[Tensor, Tensor]:
    """Returns (values float32, ids int32), the inverse of `sort_keys`."""
    ordered = (keys >> 32).to(torch.int32)
    values = (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).view(torch.float32)
    return values, (0x7FFFFFFF - (keys & 0xFFFFFFFF)).to(torch.int32)


def top_keys(tile: Tensor, shard: VocabShard, count: int, before: Tensor | None = None) -> Tensor:
    """Returns the `count` largest keys [C, count], unordered, from a tile [C, V] without padding and from the keys
    `before`."""
    ids = torch.arange(shard.start, shard.start + tile.shape[1], device=tile.device)
    keys = sort_keys(tile, ids)
    if keys.shape[1] > count:
        keys = keys.topk(count, sorted=False).values
    if before is not None:
        keys = torch.cat([before, keys], 1)
    if keys.shape[1] > count:
        keys = keys.topk(count, sorted=False).values
    return keys


def merge_top(keys: Tensor, lse: Tensor, count: int, group: ProcessGroup | None) -> Top:
    """Returns the top ids from the largest keys [N, at most count] of this process and the log-sum-exp [N] of the whole
    vocabulary. Runs one all-gather."""
    lowest = sort_keys(keys.new_full((), -torch.inf, dtype=torch.float32), keys.new_full((), NONE))
    short = count - keys.shape[1]
    keys = torch.cat([keys, lowest.expand(len(keys), short)], 1) if short else keys
    every = gather_stack(keys, group).transpose(0, 1).flatten(1)
    values, ids = split_keys(every.topk(count, sorted=True).values)
    return Top(ids, values - lse[:, None])
