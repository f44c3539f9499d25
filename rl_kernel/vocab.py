"""Log-softmax over a vocabulary that may be split over processes: what `logp` and `linear_logp` share.

Owns the split (`VocabShard`), the row statistics of a tile of logits, their merge over shards, and the
gradient of a tile. Legend: N tokens, C tokens of one tile, V real vocabulary columns of this process, P
processes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rl_kernel.checks import INTEGERS, check_tensor, invalid
from rl_kernel.collectives import gather_stack

TILE_ELEMENTS = 2**20
"""Logits of a tile: 4 MiB of float32 stay in a CPU's cache, and larger tiles measured no faster."""
TILE_MIN_ROWS = 256
"""Large vocabularies exceed TILE_ELEMENTS: with fewer rows, adding up weight gradients would dominate."""
MIN_EXPONENT = -1000.0
"""exp() of this is 0 in float64 as well: keeps columns of probability 0 (logit -inf) out of the entropy."""


@dataclass(frozen=True)
class VocabShard:
    """Columns [start, start + stored) of the vocabulary are here; those from `vocab_size` on are padding."""

    start: int
    stored: int
    vocab_size: int | None
    group: dist.ProcessGroup | None

    @property
    def real(self) -> int:
        """Columns here that are not padding; 0 when the whole shard is padding."""
        if self.vocab_size is None:
            return self.stored
        return min(max(self.vocab_size - self.start, 0), self.stored)

    def locate(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Column of each target in this shard [C, 1] (0 if it lives elsewhere) and whether it is here [C]."""
        column = targets.long() - self.start
        owned = (column >= 0) & (column < self.real)
        return torch.where(owned, column, 0)[:, None], owned


def make_shard(
    what: str,
    stored: int,
    targets: Tensor,
    vocab_start: int,
    vocab_size: int | None,
    group: dist.ProcessGroup | None,
) -> VocabShard:
    """The shard of this process, after the checks that need no other process; `what` is the tensor split."""
    if stored == 0:
        raise invalid(
            what, "hold at least one vocabulary column", "an empty shard", "use fewer tensor-parallel ranks"
        )
    if vocab_start < 0 or (group is None and vocab_start != 0):
        rule = "be >= 0, and 0 without a tp_group"
        raise invalid("vocab_start", rule, vocab_start, "pass the tp_group that holds the other columns")
    if vocab_size is not None and vocab_size < 1:
        raise invalid("vocab_size", "be >= 1", vocab_size, "leave it out when no column is padding")
    shard = VocabShard(vocab_start, stored, vocab_size, group)
    if group is None:
        check_ranges(targets, [(0, stored)], vocab_size)
    return shard


def check_targets(targets: Tensor, tokens: int, device: torch.device) -> None:
    """Integer token ids, one per token. Their range is checked where the whole vocabulary is known."""
    check_tensor("targets", targets, [tokens], INTEGERS, device=device)


def check_ranges(targets: Tensor, shards: list[tuple[int, int]], vocab_size: int | None) -> None:
    """`shards` are (start, stored) of every process. Reads the targets' range back to the host."""
    end = 0
    for start, stored in sorted(shards):
        if start != end:
            rule = "make the shards partition the vocabulary (each starts where the one before ends)"
            raise invalid(
                "vocab_start", rule, sorted(shards), "give rank r the columns before it as vocab_start"
            )
        end = start + stored
    if vocab_size is not None and vocab_size > end:
        raise invalid(
            "vocab_size", f"be <= {end}, the columns of all shards", vocab_size, "check the padding"
        )
    size = end if vocab_size is None else vocab_size
    if targets.numel():
        low, high = (int(bound) for bound in torch.aminmax(targets))
        if low < 0 or high >= size:
            todo = "check that tokenizer and model share one vocabulary"
            raise invalid("targets", f"lie in [0, {size})", f"values from {low} to {high}", todo)


def row_tiles(tokens: int, columns: int) -> Iterator[slice]:
    """Slices of rows whose logits fit one tile; together they cover [0, tokens) in order."""
    rows = max(TILE_MIN_ROWS, TILE_ELEMENTS // max(columns, 1))
    for first in range(0, tokens, rows):
        yield slice(first, min(first + rows, tokens))


def take(value: Tensor | float | None, rows: slice) -> Any:
    """The rows of a per-token tensor; a number or None as it is."""
    return value[rows] if isinstance(value, Tensor) else value


def scale_(tile: Tensor, temperature: float | Tensor) -> Tensor:
    """Divide a tile [C, V] in place by its temperature, a number or [C]."""
    if isinstance(temperature, Tensor):
        return tile.div_(temperature[:, None])
    return tile if temperature == 1.0 else tile.div_(temperature)


def row_stats(logits: Tensor, targets: Tensor, shard: VocabShard, with_entropy: bool) -> Tensor:
    """[3 or 4, C] of a tile z [C, V]: row maximum m, sum of exp(z - m), the target's logit (0 if it lives
    elsewhere) and, for the entropy, sum of exp(z - m) * (z - m)."""
    stats = logits.new_zeros(3 + with_entropy, logits.shape[0])
    if logits.shape[1] == 0:
        stats[0] = torch.finfo(logits.dtype).min
        return stats
    torch.amax(logits, 1, out=stats[0])
    shifted = logits - stats[0, :, None]
    if with_entropy:
        shifted.clamp_(min=MIN_EXPONENT)
        exps = shifted.exp()
        stats[3] = exps.mul(shifted).sum(1)
    else:
        exps = shifted.exp_()
    torch.sum(exps, 1, out=stats[1])
    column, owned = shard.locate(targets)
    stats[2] = torch.where(owned, logits.gather(1, column)[:, 0], 0)
    return stats


def merge_stats(stats: Tensor, targets: Tensor, shard: VocabShard) -> tuple[Tensor, Tensor, Tensor | None]:
    """Log-probs [N], log-sum-exp [N] and entropy [N] (when there are 4 rows) of the whole vocabulary.

    One all-gather, which also carries where each shard lies, so that wrong shards are an error on every rank.
    """
    if shard.group is None:
        parts = stats[None]
    else:
        place = stats.new_zeros(len(stats), 1)  # float32 holds column numbers up to 2**24 exactly
        place[0], place[1] = shard.start, shard.stored
        parts = gather_stack(torch.cat([place, stats], 1), shard.group)
        check_ranges(targets, [(int(p[0, 0]), int(p[1, 0])) for p in parts.cpu()], shard.vocab_size)
        parts = parts[:, :, 1:]
    top = parts[:, 0].amax(0)
    shift = parts[:, 0] - top
    scale = shift.exp()
    total = (parts[:, 1] * scale).sum(0)
    log_total = total.log()
    log_probs = parts[:, 2].sum(0) - top - log_total
    entropy = None
    if stats.shape[0] == 4:
        entropy = log_total - (scale * (parts[:, 3] + shift * parts[:, 1])).sum(0) / total
    return log_probs, top + log_total, entropy


def logits_grad(
    logits: Tensor,
    targets: Tensor,
    lse: Tensor,
    entropy: Tensor | None,
    shard: VocabShard,
    grad_log_probs: Tensor | None,
    grad_entropy: Tensor | None,
) -> Tensor:
    """Gradient of a tile [C, V] with respect to its temperature-scaled logits:
    g * (onehot(target) - p) - h * p * (log p + entropy), for upstream gradients g, h [C]."""
    log_p = logits - lse[:, None]
    if grad_entropy is None:
        assert grad_log_probs is not None
        grad = log_p.exp_().mul_(-grad_log_probs[:, None])
    else:
        assert entropy is not None
        log_p.clamp_(min=MIN_EXPONENT)
        grad = log_p.exp()
        slope = log_p.add_(entropy[:, None]).mul_(-grad_entropy[:, None])
        if grad_log_probs is not None:
            slope.sub_(grad_log_probs[:, None])
        grad.mul_(slope)
    if grad_log_probs is not None and shard.real > 0:
        column, owned = shard.locate(targets)
        # One column a row: a plain scatter of "old + g" needs no atomics and stays deterministic.
        grad.scatter_(1, column, grad.gather(1, column) + torch.where(owned, grad_log_probs, 0)[:, None])
    return grad
