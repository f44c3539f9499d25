"""Log-softmax over a vocabulary that may be split over processes. `logp` and `linear_logp` share this code.

This module owns the split (`VocabShard`), the row statistics of a tile of logits, their merge over shards, and the
gradient of a tile.

Legend: N tokens, C tokens of a tile, V columns of this process without padding, P processes.
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
"""Number of logits in a tile. 4 MiB of float32 fit into a CPU's cache, and larger tiles were not faster."""
TILE_MIN_ROWS = 256
"""Least number of rows in a tile. With a large vocabulary, a tile then exceeds TILE_ELEMENTS. With fewer rows per tile,
the sums of the weight gradient would take most of the time."""
MIN_EXPONENT = -1000.0
"""Exponent whose exp() is 0, in float64 too. Clamping to this exponent keeps columns with logit -inf out of the
entropy, without NaN."""

_checked: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, int], tuple[int, bool]]] = WeakKeyDictionary()
"""Results of `vocabulary_columns` per group, keyed by this process's (start, stored), so that each layout is compared
once."""


@dataclass(frozen=True)
class VocabShard:
    """The part of the vocabulary that this process stores: columns [start, start + stored) of `total`.

    Columns from `vocab_size` on are padding. `even`: every process stores the same number of columns, so that all
    processes derive the same plan from this number.
    """

    start: int
    stored: int
    vocab_size: int | None
    group: dist.ProcessGroup | None
    total: int
    even: bool = True

    @property
    def real(self) -> int:
        """Returns the number of columns of this shard that are not padding, or 0 if the whole shard is padding."""
        if self.vocab_size is None:
            return self.stored
        return min(max(self.vocab_size - self.start, 0), self.stored)

    @property
    def limit(self) -> int:
        """Returns the upper bound of token ids: they are in [0, limit)."""
        return self.total if self.vocab_size is None else self.vocab_size

    def tile(self, columns: slice) -> VocabShard:
        """Returns the shard that consists of the given columns of this shard."""
        first, stop, _ = columns.indices(self.stored)
        return replace(self, start=self.start + first, stored=stop - first)

    def locate(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Returns each target's column in this shard [C, 1], and whether the target is in this shard [C]. The column is
        0 for a target in another shard."""
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
    """Returns the shard of this process, after all checks. `what` is the name of the split tensor, for errors."""
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
    """Returns (columns of all shards together, whether every shard stores the same number).

    Raises ValueError on every rank unless the shards partition the vocabulary. One all-gather on the device of `like`
    compares the shards, and the host reads its result. If values must not be read (auto mode, on a device) this happens
    once per group and layout. All ranks must change their layout in the same call, or some ranks would wait for the
    others.
    """
    if group is None:
        return stored, True
    known = _checked.setdefault(group, {})
    if (start, stored) in known and not reads_values(like):
        return known[start, stored]
    bounds = torch.tensor([start, stored], device=like.device)
    shards = sorted((int(first), int(columns)) for first, columns in gather_stack(bounds, group).tolist())
    end = 0
    for first, columns in shards:
        if first != end:
            rule = "make the shards partition the vocabulary (each starts where the one before ends)"
            raise invalid("vocab_start", rule, shards, "give rank r the columns before it as vocab_start")
        end = first + columns
    known[start, stored] = end, len({columns for _, columns in shards}) == 1
    return known[start, stored]


def check_targets(targets: Tensor, tokens: int, device: torch.device) -> None:
    """Raises ValueError unless `targets` are integer token ids, one per token. `check_range` checks their range."""
    check_tensor("targets", targets, [tokens], INTEGERS, device=device)


def check_range(targets: Tensor, limit: int) -> None:
    """Raises ValueError if an id is outside [0, limit). Checks only where values may be read."""
    if targets.numel() and reads_values(targets):
        low, high = (int(bound) for bound in torch.aminmax(targets))
        if low < 0 or high >= limit:
            todo = "check that tokenizer and model share one vocabulary"
            raise invalid("targets", f"lie in [0, {limit})", f"values from {low} to {high}", todo)


def check_temperature(temperature: float | Tensor, tokens: int, device: torch.device) -> None:
    """Raises ValueError unless `temperature` is a positive number, or a constant tensor with a positive number per
    token. The values of a tensor are checked only where they may be read."""
    if isinstance(temperature, Tensor) and not reads_values(temperature):
        check_tensor("temperature", temperature, [tokens], device=device)
        check_constant(temperature=temperature)
    else:
        checks.check_temperature(temperature, tokens, device)


def usable_temperature(temperature: float | Tensor, dtype: torch.dtype) -> float | Tensor:
    """Returns a temperature tensor in the compute dtype; a number stays as it is. If `check_temperature` did not
    read the values, NaN replaces values that are not positive and finite."""
    if not isinstance(temperature, Tensor):
        return temperature
    wide = temperature.to(dtype)
    if reads_values(temperature):
        return wide
    return torch.where((wide > 0) & (wide < torch.inf), wide, torch.nan)


def row_tiles(tokens: int, columns: int) -> Iterator[slice]:
    """Yields slices of rows whose logits fit into one tile. The slices cover [0, tokens) in order."""
    rows = max(TILE_MIN_ROWS, TILE_ELEMENTS // max(columns, 1))
    for first in range(0, tokens, rows):
        yield slice(first, min(first + rows, tokens))


def take(value: Any, rows: slice) -> Any:
    """Returns the given rows of a per-token tensor or of `KeptTokens`. A number or None is returned unchanged."""
    if value is None or isinstance(value, (int, float)):
        return value
    return value[rows] if isinstance(value, Tensor) else value.rows(rows)


def scale_(tile: Tensor, temperature: float | Tensor) -> Tensor:
    """Divides a tile [C, V] by its temperature, a number or [C], in place."""
    if isinstance(temperature, Tensor):
        return tile.div_(temperature[:, None])
    return tile if temperature == 1.0 else tile.div_(temperature)


def check_cap(logit_cap: float | None, logit_scale: float) -> None:
    """Raises ValueError unless both values are positive and finite. A cap of None means no cap."""
    for name, value in (("logit_cap", 1.0 if logit_cap is None else logit_cap), ("logit_scale", logit_scale)):
        if not 0 < value < float("inf"):
            raise invalid(name, "be > 0 and finite", value, "leave it out for a model without one")


def capped(logits: Tensor, cap: float | None) -> Tensor:
    """Returns `cap * tanh(logits / cap)`, each step in the dtype of the logits, as engines compute it. A cap of None
    returns the logits."""
    return logits if cap is None else cap * torch.tanh(logits / cap)


def cap_slope_(grad: Tensor, z: Tensor, temperature: float | Tensor, cap: float | None) -> Tensor:
    """Multiplies a gradient [C, V] by the slope of `capped`, `1 - (z * temperature / cap) ** 2`, in place. z [C, V] are
    the capped logits divided by the temperature."""
    if cap is None:
        return grad
    ratio = temperature[:, None] / cap if isinstance(temperature, Tensor) else temperature / cap
    return grad.mul_(1 - (z * ratio).square_())


def row_stats(logits: Tensor, targets: Tensor, shard: VocabShard, with_entropy: bool) -> Tensor:
    """Returns the statistics [3 or 4, C] of a tile z [C, V]: row maximum m, sum of exp(z - m), the target's logit (0 if
    another shard stores the target) and, for the entropy, sum of exp(z - m) * (z - m). A row without columns, or with
    columns of -inf only, gets the lowest finite number as its maximum, so that the merge with other shards stays
    finite."""
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
    """Returns the `row_stats` [3 or 4, C] of all columns from the statistics of P parts [P, 3 or 4, C]."""
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
    """Returns log-probs [N], log-sum-exp [N], entropy [N] or None, and log-sum-exp [N] of the entropy's distribution,
    over the whole vocabulary. Log-probs of targets outside the vocabulary are NaN. Runs one all-gather.

    `stats` has 3 rows, or 4 with the entropy. It has 7 rows if log-probs and entropy have different distributions (kept
    ids): the first 3 belong to the log-probs and the last 4 to the entropy.
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
    """Returns the gradient of a tile [C, V] in its logits (already divided by the temperature): `g * (onehot(target) -
    p) - h * p * (log p + entropy)`, for upstream gradients g, h [C]."""
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
        # Each row changes one column, so a plain scatter of "old + g" needs no atomics and is deterministic.
        grad.scatter_(1, column, grad.gather(1, column) + torch.where(owned, grad_log_probs, 0)[:, None])
    return grad
