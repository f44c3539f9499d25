"""Log-softmax over a vocabulary that may be split over processes: what `logp` and `linear_logp` share.

Owns the split (`VocabShard`), the row statistics of a tile of logits, their merge over shards, and the
gradient of a tile. Legend: N tokens, C tokens of one tile, V real vocabulary columns of this process, P
processes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from rl_kernel import checks
from rl_kernel.checks import INTEGERS, check_constant, check_tensor, invalid
from rl_kernel.collectives import gather_stack
from rl_kernel.mode import reads_values

TILE_ELEMENTS = 2**20
"""Logits of a tile: 4 MiB of float32 stay in a CPU's cache, and larger tiles measured no faster."""
TILE_MIN_ROWS = 256
"""Large vocabularies exceed TILE_ELEMENTS: with fewer rows, adding up weight gradients would dominate."""
MIN_EXPONENT = -1000.0
"""exp() of this is 0 in float64 as well: keeps columns of probability 0 (logit -inf) out of the entropy."""

_checked: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, int], tuple[int, bool]]] = WeakKeyDictionary()
"""What `vocabulary_columns` found, by group and (start, stored) of this process, once the shards were compared."""


@dataclass(frozen=True)
class VocabShard:
    """Columns [start, start + stored) of the `total` of the vocabulary are here; those from `vocab_size` on are
    padding. `even`: every process stores as many, so that what is planned from their number is the same everywhere."""

    start: int
    stored: int
    vocab_size: int | None
    group: dist.ProcessGroup | None
    total: int
    even: bool = True

    @property
    def real(self) -> int:
        """Columns here that are not padding; 0 when the whole shard is padding."""
        if self.vocab_size is None:
            return self.stored
        return min(max(self.vocab_size - self.start, 0), self.stored)

    @property
    def limit(self) -> int:
        """Ids of the whole vocabulary lie in [0, limit)."""
        return self.total if self.vocab_size is None else self.vocab_size

    def tile(self, columns: slice) -> VocabShard:
        """The shard that is `columns` of this one."""
        first, stop, _ = columns.indices(self.stored)
        return replace(self, start=self.start + first, stored=stop - first)

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
    total, even = vocabulary_columns(vocab_start, stored, group, targets)
    if vocab_size is not None and vocab_size > total:
        rule = f"be <= {total}, the columns of all shards"
        raise invalid("vocab_size", rule, vocab_size, "check the padding")
    shard = VocabShard(vocab_start, stored, vocab_size, group, total, even)
    check_range(targets, shard.limit)
    return shard


def vocabulary_columns(
    start: int, stored: int, group: dist.ProcessGroup | None, like: Tensor
) -> tuple[int, bool]:
    """Columns of all shards, which must partition the vocabulary, and whether all store as many; wrong shards are an
    error on every rank.

    Compares the shards in one all-gather on the device of `like` and reads it back. Where values must not be read
    (auto mode, on a device) that is done once per group and layout: the ranks must change their layout together,
    or some would wait for the others.
    """
    if group is None:
        return stored, True
    known = _checked.setdefault(group, {})
    if (start, stored) in known and not reads_values(like):
        return known[start, stored]
    place = torch.tensor([start, stored], device=like.device)
    shards = sorted((int(first), int(columns)) for first, columns in gather_stack(place, group).tolist())
    end = 0
    for first, columns in shards:
        if first != end:
            rule = "make the shards partition the vocabulary (each starts where the one before ends)"
            raise invalid("vocab_start", rule, shards, "give rank r the columns before it as vocab_start")
        end = first + columns
    known[start, stored] = end, len({columns for _, columns in shards}) == 1
    return known[start, stored]


def check_targets(targets: Tensor, tokens: int, device: torch.device) -> None:
    """Integer token ids, one per token. Their range is checked where the whole vocabulary is known."""
    check_tensor("targets", targets, [tokens], INTEGERS, device=device)


def check_range(targets: Tensor, limit: int) -> None:
    """Ids in [0, limit), if their values may be read."""
    if targets.numel() and reads_values(targets):
        low, high = (int(bound) for bound in torch.aminmax(targets))
        if low < 0 or high >= limit:
            todo = "check that tokenizer and model share one vocabulary"
            raise invalid("targets", f"lie in [0, {limit})", f"values from {low} to {high}", todo)


def check_temperature(temperature: float | Tensor, tokens: int, device: torch.device) -> None:
    """A positive number, or one positive number per token; a constant. A tensor's values only if they may be read."""
    if isinstance(temperature, Tensor) and not reads_values(temperature):
        check_tensor("temperature", temperature, [tokens], device=device)
        check_constant(temperature=temperature)
    else:
        checks.check_temperature(temperature, tokens, device)


def usable_temperature(temperature: float | Tensor, dtype: torch.dtype) -> float | Tensor:
    """In the compute dtype; where nobody looked at the values, NaN instead of those that are no temperature."""
    if not isinstance(temperature, Tensor):
        return temperature
    wide = temperature.to(dtype)
    if reads_values(temperature):
        return wide
    return torch.where((wide > 0) & (wide < torch.inf), wide, torch.nan)


def row_tiles(tokens: int, columns: int) -> Iterator[slice]:
    """Slices of rows whose logits fit one tile; together they cover [0, tokens) in order."""
    rows = max(TILE_MIN_ROWS, TILE_ELEMENTS // max(columns, 1))
    for first in range(0, tokens, rows):
        yield slice(first, min(first + rows, tokens))


def take(value: Any, rows: slice) -> Any:
    """The rows of a per-token tensor or of `KeptTokens`; a number or None as it is."""
    if value is None or isinstance(value, (int, float)):
        return value
    return value[rows] if isinstance(value, Tensor) else value.rows(rows)


def scale_(tile: Tensor, temperature: float | Tensor) -> Tensor:
    """Divide a tile [C, V] in place by its temperature, a number or [C]."""
    if isinstance(temperature, Tensor):
        return tile.div_(temperature[:, None])
    return tile if temperature == 1.0 else tile.div_(temperature)


def row_stats(logits: Tensor, targets: Tensor, shard: VocabShard, with_entropy: bool) -> Tensor:
    """[3 or 4, C] of a tile z [C, V]: row maximum m, sum of exp(z - m), the target's logit (0 if it lives
    elsewhere) and, for the entropy, sum of exp(z - m) * (z - m). A row without columns, or with none above -inf,
    has the lowest number as its maximum: the merge with other shards stays finite."""
    stats = logits.new_zeros(3 + with_entropy, logits.shape[0])
    lowest = torch.finfo(logits.dtype).min
    if logits.shape[1] == 0:
        stats[0] = lowest
        return stats
    torch.amax(logits, 1, out=stats[0]).clamp_(min=lowest)
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


def combined(parts: Tensor) -> Tensor:
    """Stats [3 or 4, C] of the columns of all parts [P, 3 or 4, C] together."""
    top = parts[:, 0].amax(0)
    shift = parts[:, 0] - top
    scale = shift.exp()
    stats = [top, (parts[:, 1] * scale).sum(0), parts[:, 2].sum(0)]
    if parts.shape[1] == 4:
        stats.append((scale * (parts[:, 3] + shift * parts[:, 1])).sum(0))
    return torch.stack(stats)


def merge_stats(
    stats: Tensor, targets: Tensor, shard: VocabShard
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """Log-probs [N], log-sum-exp [N], entropy [N] (when there are 4 rows) and log-sum-exp [N] of its distribution, over
    the whole vocabulary; NaN log-probs for targets outside it. One all-gather.

    Of 7 rows the first 3 are of the log-probs' distribution and the others of the entropy's; else they are the same.
    """
    parts = gather_stack(stats, shard.group)
    top, total, logit, *weighted = combined(parts[:, -4:])
    log_total = total.log()
    whole_lse = lse = top + log_total
    entropy = log_total - weighted[0] / total if weighted else None
    if len(stats) == 7:
        top, total, logit = combined(parts[:, :3])
        log_total = total.log()
        lse = top + log_total
    log_probs = logit - top - log_total
    if not reads_values(targets):
        log_probs.masked_fill_((targets < 0) | (targets >= shard.limit), torch.nan)
    return log_probs, lse, entropy, whole_lse


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
