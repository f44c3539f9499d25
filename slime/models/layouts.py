"""The parts of a family's weight table: rows and layouts. torch is imported only when a layout runs.

A `Row` connects a Megatron parameter with its HF tensors. Its `Layout` converts between them and splits the Megatron
tensor over tensor-parallel ranks, so one table serves loading, export and every TP size.

Shapes: H hidden, D head size, A query heads, G key/value groups, F feed-forward, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from slime.models.decoder import DeltaNet, Mamba, WideHeads

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Sizes:
    """The sizes that layouts need."""

    groups: int
    """G, the number of heads of keys and values."""
    head_dim: int
    """D, the head size."""
    vocab: int
    """V without padding."""
    padded_vocab: int
    """V with padding."""
    delta: DeltaNet | Mamba | None = None
    """Sizes of gated delta net layers or Mamba-2 layers."""
    wide: WideHeads | None = None
    """Heads of layers whose values are their keys."""


def cat(parts: Sequence[Tensor], dim: int = 0) -> Tensor:
    import torch

    return torch.cat(list(parts), dim=dim)


class Layout(Protocol):
    """Conversion between HF tensors and a Megatron tensor: `join(split(full)) == full` and `merge(shard(full, 0..n-1))
    == full`, bitwise. It works on meta tensors too.

    `join` and `shard` move whole slices of `axis` and do not read the other sizes. With `axis` None, the slices are
    rows, and every rank has the whole tensor. So loading finds the slices of a rank by moving slice numbers
    (slime.models.slices).
    """

    @property
    def axis(self) -> int | None: ...

    def __hash__(self) -> int: ...

    def join(self, parts: Sequence[Tensor], sizes: Sizes) -> Tensor:
        """Joins HF tensors into the full Megatron tensor."""
        ...

    def split(self, full: Tensor, sizes: Sizes) -> list[Tensor]:
        """Splits the full Megatron tensor into HF tensors, in the row's order."""
        ...

    def shard(self, full: Tensor, rank: int, size: int) -> Tensor:
        """Returns the part of the full Megatron tensor that tensor-parallel rank `rank` of `size` holds."""
        ...

    def merge(self, shards: Sequence[Tensor]) -> Tensor:
        """Merges the shards of all tensor-parallel ranks into the full Megatron tensor."""
        ...

    def columns(self, rows: Tensor) -> Tensor:
        """Returns rows of an HF tensor with their columns in Megatron's order."""
        ...


@dataclass(frozen=True)
class Direct:
    """Layout with one HF tensor, which equals the Megatron tensor."""

    axis: int | None = None
    """Axis that tensor-parallel ranks split. None means that every rank has the whole tensor."""

    def join(self, parts: Sequence[Tensor], sizes: Sizes) -> Tensor:
        return parts[0]

    def split(self, full: Tensor, sizes: Sizes) -> list[Tensor]:
        return [full]

    def shard(self, full: Tensor, rank: int, size: int) -> Tensor:
        return full if self.axis is None else full.chunk(size, dim=self.axis)[rank]

    def merge(self, shards: Sequence[Tensor]) -> Tensor:
        return shards[0] if self.axis is None else cat(shards, self.axis)

    def columns(self, rows: Tensor) -> Tensor:
        return rows


@dataclass(frozen=True)
class Vocab(Direct):
    """Layout of [V, H] with zero rows appended up to the padded vocabulary, split by rows."""

    axis: int | None = 0

    def join(self, parts: Sequence[Tensor], sizes: Sizes) -> Tensor:
        from torch.nn.functional import pad

        return pad(parts[0], (0, 0, 0, sizes.padded_vocab - sizes.vocab))

    def split(self, full: Tensor, sizes: Sizes) -> list[Tensor]:
        return [full[: sizes.vocab]]


@dataclass(frozen=True)
class GroupedQkv(Direct):
    """Layout of q [A*D, ...], k and v [G*D, ...] interleaved by group: (q heads of group 0, k 0, v 0, q heads of group
    1, ..)."""

    axis: int | None = 0

    def join(self, parts: Sequence[Tensor], sizes: Sizes) -> Tensor:
        by_group = [part.reshape(sizes.groups, -1, *part.shape[1:]) for part in parts]
        return cat(by_group, 1).flatten(0, 1)

    def split(self, full: Tensor, sizes: Sizes) -> list[Tensor]:
        by_group = full.reshape(sizes.groups, -1, *full.shape[1:])
        q_rows = by_group.shape[1] - 2 * sizes.head_dim
        return [x.flatten(0, 1) for x in by_group.split([q_rows, sizes.head_dim, sizes.head_dim], dim=1)]


@dataclass(frozen=True)
class GroupedQueryKey(Direct):
    """Layout of q and k of `Sizes.wide` interleaved by group: (q heads of group 0, k 0, q heads of group 1, ..)."""

    axis: int | None = 0

    def join(self, parts: Sequence[Tensor], sizes: Sizes) -> Tensor:
        assert sizes.wide is not None
        groups = sizes.wide.groups
        return cat([part.reshape(groups, -1, *part.shape[1:]) for part in parts], 1).flatten(0, 1)

    def split(self, full: Tensor, sizes: Sizes) -> list[Tensor]:
        assert sizes.wide is not None
        by_group = full.reshape(sizes.wide.groups, -1, *full.shape[1:])
        rows = [by_group.shape[1] - sizes.wide.head_dim, sizes.wide.head_dim]
        return [x.flatten(0, 1) for x in by_group.split(rows, dim=1)]


@dataclass(frozen=True)
class GateUp(Direct):
    """Layout of gate [F, H] above up [F, H]. A rank has its part of gate above its part of up."""

    axis: int | None = 0

    def join(self, parts: Sequence[Tensor], sizes: Sizes) -> Tensor:
        return cat(parts)

    def split(self, full: Tensor, sizes: Sizes) -> list[Tensor]:
        return list(full.chunk(2))

    def shard(self, full: Tensor, rank: int, size: int) -> Tensor:
        return cat([half.chunk(size)[rank] for half in full.chunk(2)])

    def merge(self, shards: Sequence[Tensor]) -> Tensor:
        gates, ups = zip(*(shard.chunk(2) for shard in shards), strict=True)
        return cat([*gates, *ups])


@dataclass(frozen=True)
class Row:
    """One Megatron parameter and its HF tensors. In the names, "{i}" is the layer and "{e}" the expert, both from 0."""

    megatron: str
    hf: tuple[str, ...]
    layout: Layout = Direct()

    @property
    def is_expert(self) -> bool:
        """Returns whether expert-parallel ranks split the row's parameters. Megatron numbers only the experts on its
        own rank."""
        return "{e}" in self.megatron


@dataclass(frozen=True)
class GateUpTensor(GateUp):
    """`GateUp` for a family whose files hold gate above up in one tensor [2 F, H]."""

    def split(self, full: Tensor, sizes: Sizes) -> list[Tensor]:
        return [full]


@dataclass(frozen=True)
class SwappedHalves(Direct):
    """Layout that swaps the two column halves of [H, 2 H]: files have the product of (state, embedding), and Megatron
    has the product of (embedding, state)."""

    axis: int | None = 0

    def join(self, parts: Sequence[Tensor], sizes: Sizes) -> Tensor:
        return self.columns(parts[0])

    def split(self, full: Tensor, sizes: Sizes) -> list[Tensor]:
        return [self.columns(full)]

    def columns(self, rows: Tensor) -> Tensor:
        return rows.roll(rows.shape[-1] // 2, -1)
