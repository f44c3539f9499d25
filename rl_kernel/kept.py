"""The ids that top-p or top-k sampling kept in a rollout: the record, its checks, and its softmax in plain PyTorch.

The log-prob of a token comes from the softmax over its kept ids, as the rollout sampled it. The entropy comes from the
softmax over all ids.

Legend: N tokens, M kept ids in total, C tokens of a tile, V columns of a tile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rl_kernel.checks import INTEGERS, check_tensor, invalid
from rl_kernel.mode import reads_values
from rl_kernel.vocab import VocabShard, logits_grad, row_stats


@dataclass(frozen=True)
class KeptTokens:
    """Kept ids of N tokens: token t kept `ids[offsets[t] : offsets[t + 1]]`. A token without ids is not truncated.

    `ids` [M] int32 or int64 are ids of the whole vocabulary, in any order. If the vocabulary is split, every process
    gets all ids and uses the ids in its columns. `offsets` is [N + 1] int64.
    """

    ids: Tensor
    offsets: Tensor

    @classmethod
    def from_lists(cls, rows: Sequence[Sequence[int]], device: torch.device | str = "cpu") -> KeptTokens:
        """Builds the record from one list of ids per token. A token with an empty list is not truncated."""
        ids = torch.tensor([token for row in rows for token in row], dtype=torch.int64)
        counts = torch.tensor([0, *(len(row) for row in rows)], dtype=torch.int64)
        return cls(ids.to(device), counts.cumsum(0).to(device))

    @property
    def truncated(self) -> Tensor:
        """Returns [N] bool: True for tokens with kept ids."""
        return self.offsets.clamp(0, len(self.ids)).diff() > 0

    def rows(self, rows: slice) -> KeptTokens:
        """Returns the record of the tokens in `rows`: all ids, with fewer offsets. Slicing the ids would wait for the
        device."""
        first, stop, _ = rows.indices(len(self.offsets) - 1)
        return KeptTokens(self.ids, self.offsets[first : max(first, stop) + 1])


def check_kept(kept: KeptTokens | None, targets: Tensor, limit: int) -> None:
    """Checks shapes, dtypes and device.

    If values may be read, the function also checks that the offsets rise and cover the ids, that the ids are in [0,
    limit), and that the target of a truncated token is one of its ids. If values are not read, the operators ignore
    a wrong offset or id, and a target that was not kept has the log-prob -inf.
    """
    if kept is None:
        return
    if not isinstance(kept, KeptTokens):
        raise invalid("keep_mask", "be a KeptTokens", type(kept).__name__, "use KeptTokens.from_lists")
    check_tensor("keep_mask.ids", kept.ids, ["M"], INTEGERS, device=targets.device)
    offsets = kept.offsets
    check_tensor("keep_mask.offsets", offsets, [len(targets) + 1], (torch.int64,), device=targets.device)
    if not reads_values(targets):
        return
    ends = int(offsets[0]), int(offsets[-1])
    if ends != (0, len(kept.ids)) or bool((offsets[1:] < offsets[:-1]).any()):
        rule = f"rise from 0 to {len(kept.ids)}, the number of ids"
        got = f"values from {ends[0]} to {ends[1]}" + (", unsorted" * (ends == (0, len(kept.ids))))
        raise invalid("keep_mask.offsets", rule, got, "give the running sum of the ids per token")
    if not len(kept.ids):
        return
    low, high = (int(bound) for bound in torch.aminmax(kept.ids))
    if low < 0 or high >= limit:
        got = f"values from {low} to {high}"
        raise invalid("keep_mask.ids", f"lie in [0, {limit})", got, "give ids of the whole vocabulary")
    counts = offsets.diff()
    token = torch.repeat_interleave(counts)
    hits = torch.zeros_like(counts).index_add_(0, token, (kept.ids == targets[token]).long())
    lost = (counts > 0) & (hits == 0)
    if lost.any():
        row = int(lost.nonzero()[0])
        got = f"target {int(targets[row])} of token {row}, which is not"
        raise invalid("keep_mask.ids", "hold each truncated token's target", got, "add the sampled token")


def _token_indices(kept: KeptTokens) -> Tensor:
    """Returns the token [M] of every id; -1 or N for an id of a token outside the record. The shape does not depend on
    values."""
    position = torch.arange(len(kept.ids), device=kept.ids.device)
    return torch.searchsorted(kept.offsets.contiguous(), position, right=True) - 1


def repeated(kept: KeptTokens, limit: int) -> Tensor:
    """Returns [M] bool: True for ids that repeat an earlier id of the same token. Sums over ids skip these. Computed on
    the device, with up to 64 bytes per id."""
    ids = kept.ids.long()
    # Ids outside the vocabulary share one extra key, so that they cannot collide with the ids of the next token.
    key = _token_indices(kept) * (limit + 1) + torch.where((ids >= 0) & (ids < limit), ids, limit)
    key, order = key.sort(stable=True)
    again = torch.zeros_like(ids, dtype=torch.bool)
    return again.scatter_(0, order[1:], key[1:] == key[:-1])


def kept_logits(tile: Tensor, kept: KeptTokens, shard: VocabShard) -> Tensor:
    """Returns a copy of the logits [C, V] with -inf in all columns that a truncated token did not keep.

    The tile holds the columns `shard.start` to `shard.start + V` of `kept`'s C tokens. If no id of a truncated token is
    in these columns, its whole row is -inf.
    """
    tokens, columns = tile.shape
    token = _token_indices(kept)
    column = kept.ids.long() - shard.start
    here = (token >= 0) & (token < tokens) & (column >= 0) & (column < columns)
    keep = torch.zeros(tokens + 1, columns + 1, dtype=torch.bool, device=tile.device)
    keep[torch.where(here, token, tokens), torch.where(here, column, columns)] = True
    return tile.masked_fill(kept.truncated[:, None] & ~keep[:tokens, :columns], -torch.inf)


def kept_stats(
    logits: Tensor, targets: Tensor, shard: VocabShard, with_entropy: bool, kept: KeptTokens | None
) -> Tensor:
    """Returns `row_stats` of a tile. With kept ids the result is [3 or 7, C]: the statistics of the kept columns [3,
    C], then, for the entropy, the statistics over all columns [4, C]."""
    if kept is None:
        return row_stats(logits, targets, shard, with_entropy)
    stats = row_stats(kept_logits(logits, kept, shard), targets, shard, False)
    return torch.cat([stats, row_stats(logits, targets, shard, True)]) if with_entropy else stats


def stats_count(with_entropy: bool, kept: KeptTokens | None) -> int:
    """Returns the number of rows of `kept_stats`."""
    return 3 + with_entropy if kept is None else 3 + 4 * with_entropy


def kept_grad(
    logits: Tensor,
    targets: Tensor,
    lse: Tensor,
    whole_lse: Tensor,
    entropy: Tensor | None,
    shard: VocabShard,
    kept: KeptTokens | None,
    grad_log_probs: Tensor | None,
    grad_entropy: Tensor | None,
) -> Tensor:
    """Returns `logits_grad` of a tile. With kept ids, the gradient of the log-prob covers the kept columns with their
    log-sum-exp `lse`, and the gradient of the entropy covers all columns with `whole_lse`."""
    if kept is None:
        return logits_grad(logits, targets, lse, entropy, shard, grad_log_probs, grad_entropy)
    if grad_log_probs is None:
        return logits_grad(logits, targets, whole_lse, entropy, shard, None, grad_entropy)
    grad = logits_grad(kept_logits(logits, kept, shard), targets, lse, None, shard, grad_log_probs, None)
    if grad_entropy is not None:
        grad += logits_grad(logits, targets, whole_lse, entropy, shard, None, grad_entropy)
    return grad
