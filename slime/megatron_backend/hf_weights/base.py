"""What a family's weight table is made of. Owns the layouts; the tables themselves are one file a family.

A `Row` ties one Megatron parameter to the HF tensors it is made of. Its `Layout` converts between the two and cuts
the Megatron tensor over tensor-parallel ranks, so that one table serves loading, export and every TP size.

Shapes: H hidden, D head size, A query heads, G key/value groups, F feed-forward, V vocabulary.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad


@dataclass(frozen=True)
class Sizes:
    """What layouts need of a model: `groups` G, `head_dim` D, `vocab` the real V, `padded_vocab` V with padding."""

    groups: int
    head_dim: int
    vocab: int
    padded_vocab: int


class Layout(Protocol):
    """`join(split(full)) == full` and `merge(shard(full, 0..n-1)) == full`, bitwise. Works on meta tensors too."""

    def join(self, parts: Sequence[Tensor], sizes: Sizes) -> Tensor:
        """HF tensors -> the full Megatron tensor."""
        ...

    def split(self, full: Tensor, sizes: Sizes) -> list[Tensor]:
        """The full Megatron tensor -> HF tensors, in the row's order."""
        ...

    def shard(self, full: Tensor, rank: int, size: int) -> Tensor:
        """The part of the full Megatron tensor that tensor-parallel rank `rank` of `size` holds."""
        ...

    def merge(self, shards: Sequence[Tensor]) -> Tensor:
        """The shards of all tensor-parallel ranks -> the full Megatron tensor."""
        ...


@dataclass(frozen=True)
class Direct:
    """One HF tensor, same layout. `axis` is cut over tensor-parallel ranks; None means every rank holds it all."""

    axis: int | None = None

    def join(self, parts: Sequence[Tensor], sizes: Sizes) -> Tensor:
        return parts[0]

    def split(self, full: Tensor, sizes: Sizes) -> list[Tensor]:
        return [full]

    def shard(self, full: Tensor, rank: int, size: int) -> Tensor:
        return full if self.axis is None else full.chunk(size, dim=self.axis)[rank]

    def merge(self, shards: Sequence[Tensor]) -> Tensor:
        return shards[0] if self.axis is None else torch.cat(list(shards), dim=self.axis)


@dataclass(frozen=True)
class Vocab(Direct):
    """[V, H] with zero rows appended up to the padded vocabulary, cut over rows."""

    axis: int | None = 0

    def join(self, parts: Sequence[Tensor], sizes: Sizes) -> Tensor:
        return pad(parts[0], (0, 0, 0, sizes.padded_vocab - sizes.vocab))

    def split(self, full: Tensor, sizes: Sizes) -> list[Tensor]:
        return [full[: sizes.vocab]]


@dataclass(frozen=True)
class GroupedQkv(Direct):
    """q [A*D, ...], k and v [G*D, ...] interleaved by group: (q heads of group 0, k 0, v 0, q heads of group 1, ..)."""

    axis: int | None = 0

    def join(self, parts: Sequence[Tensor], sizes: Sizes) -> Tensor:
        by_group = [part.reshape(sizes.groups, -1, *part.shape[1:]) for part in parts]
        return torch.cat(by_group, dim=1).flatten(0, 1)

    def split(self, full: Tensor, sizes: Sizes) -> list[Tensor]:
        by_group = full.reshape(sizes.groups, -1, *full.shape[1:])
        q_rows = by_group.shape[1] - 2 * sizes.head_dim
        return [x.flatten(0, 1) for x in by_group.split([q_rows, sizes.head_dim, sizes.head_dim], dim=1)]


@dataclass(frozen=True)
class GateUp:
    """gate [F, H] above up [F, H]; a rank holds its part of gate above its part of up."""

    def join(self, parts: Sequence[Tensor], sizes: Sizes) -> Tensor:
        return torch.cat(list(parts))

    def split(self, full: Tensor, sizes: Sizes) -> list[Tensor]:
        return list(full.chunk(2))

    def shard(self, full: Tensor, rank: int, size: int) -> Tensor:
        return torch.cat([half.chunk(size)[rank] for half in full.chunk(2)])

    def merge(self, shards: Sequence[Tensor]) -> Tensor:
        gates, ups = zip(*(shard.chunk(2) for shard in shards), strict=True)
        return torch.cat([*gates, *ups])


@dataclass(frozen=True)
class Row:
    """One Megatron parameter and the HF tensors it is made of; "{i}" in the names stands for the layer, "{e}" for the
    expert, both from 0."""

    megatron: str
    hf: tuple[str, ...]
    layout: Layout = Direct()

    @property
    def of_expert(self) -> bool:
        """Whether expert-parallel ranks share the row's parameters, and which number the experts of a rank only."""
        return "{e}" in self.megatron


@dataclass(frozen=True)
class Family:
    """A model family: its table, and the architecture switches that config.json does not spell out.

    `ignored` are HF names that may be in a checkpoint but hold nothing the model uses.
    """

    name: str
    rows: tuple[Row, ...]
    qkv_bias: bool
    qk_norm: bool
    ignored: tuple[str, ...] = ()

    def find(self, parameter: str) -> tuple[Row, tuple[str, ...]]:
        """The row of a Megatron parameter and its HF names with the numbers filled in. KeyError when there is none."""
        for row in self.rows:
            pattern = re.escape(row.megatron)
            for letter in "ie":
                pattern = pattern.replace(re.escape(f"{{{letter}}}"), rf"(?P<{letter}>\d+)")
            if match := re.fullmatch(pattern, parameter):
                return row, tuple(name.format(**match.groupdict()) for name in row.hf)
        raise KeyError(f"{parameter} has no row in the {self.name} table")

    def ignores(self, hf_name: str) -> bool:
        return any(
            re.fullmatch(re.escape(name).replace(re.escape("{i}"), r"\d+"), hf_name) for name in self.ignored
        )
