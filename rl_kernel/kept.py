"""The tokens that a rollout's top-p/top-k sampling kept, in compact form, and the softmax over them.

Owns the record (`KeptTokens`), its checks and the plain PyTorch mask. Legend: N tokens, M kept ids of all tokens,
C tokens of one tile, V columns of a tile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rl_kernel.checks import INTEGERS, check_tensor, invalid
from rl_kernel.mode import reads_values
from rl_kernel.vocab import VocabShard


@dataclass(frozen=True)
class KeptTokens:
    """Token t kept `ids[offsets[t] : offsets[t + 1]]`; one without ids is not truncated.

    `ids` [M] int32 or int64 are of the whole vocabulary, in any order: under a vocabulary split every process has
    all of them and uses those of its own columns. `offsets` [N + 1] int64.
    """

    ids: Tensor
    offsets: Tensor

    @classmethod
    def from_lists(cls, rows: Sequence[Sequence[int]], device: torch.device | str = "cpu") -> KeptTokens:
        """One list of ids per token; an empty one for a token that is not truncated."""
        ids = torch.tensor([token for row in rows for token in row], dtype=torch.int64)
        counts = torch.tensor([0, *(len(row) for row in rows)], dtype=torch.int64)
        return cls(ids.to(device), counts.cumsum(0).to(device))

    def rows(self, rows: slice) -> KeptTokens:
        """Those of some tokens: the same ids under fewer offsets, so that nothing waits for the device."""
        first, stop, _ = rows.indices(len(self.offsets) - 1)
        return KeptTokens(self.ids, self.offsets[first : max(first, stop) + 1])


def check_kept(kept: KeptTokens | None, targets: Tensor, limit: int) -> None:
    """Shapes, dtypes and device; where values may be read also that the offsets are sorted and cover the ids, that
    the ids lie in [0, limit), and that a truncated token's target is one of its ids. Unread, a wrong offset or id
    counts for nothing and a target that was not kept has log-prob -inf."""
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


def keep_reference_(tile: Tensor, kept: KeptTokens | None, shard: VocabShard) -> Tensor:
    """Set the logits [C, V] of all columns that a truncated token did not keep to -inf, in place.

    `tile[:, shard.start : shard.start + V]` of `kept`'s C tokens; a token of which no id lies here loses its whole row.
    """
    if kept is None or tile.numel() == 0:
        return tile
    tokens, columns = tile.shape
    offsets = kept.offsets
    # Shapes must not depend on values: every id of the call looks for its token, most find none.
    position = torch.arange(len(kept.ids), device=tile.device)
    token = torch.searchsorted(offsets, position, right=True) - 1
    column = kept.ids.long() - shard.start
    here = (token >= 0) & (token < tokens) & (column >= 0) & (column < columns)
    keep = torch.zeros(tokens, columns + 1, dtype=torch.bool, device=tile.device)
    keep[torch.where(here, token, 0), torch.where(here, column, columns)] = True
    truncated = offsets[1:] > offsets[:-1]
    return tile.masked_fill_(truncated[:, None] & ~keep[:, :columns], -torch.inf)
