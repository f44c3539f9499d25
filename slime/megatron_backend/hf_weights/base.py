"""The parts of a family's weight table. Owns the layouts. Each family has one file with its table.

A `Row` connects one Megatron parameter with its HF tensors. Its `Layout` converts between them and splits the Megatron
tensor over tensor-parallel ranks, so one table serves loading, export and every TP size.

Shapes: H hidden, D head size, A query heads, G key/value groups, F feed-forward, V vocabulary.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad


@dataclass(frozen=True)
class Sizes:
    """The sizes that layouts need: `groups` G, `head_dim` D, `vocab` the real V, `padded_vocab` V with padding."""

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
    """One HF tensor, same layout. `axis` is split over tensor-parallel ranks. None: every rank has the whole tensor."""

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
    """[V, H] with zero rows appended up to the padded vocabulary, split by rows."""

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
    """gate [F, H] above up [F, H]. A rank has its part of gate above its part of up."""

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
    """One Megatron parameter and its HF tensors. In the names, "{i}" is the layer and "{e}" the expert, both from 0."""

    megatron: str
    hf: tuple[str, ...]
    layout: Layout = Direct()

    @property
    def of_expert(self) -> bool:
        """Whether expert-parallel ranks split the row's parameters. Megatron numbers only the experts of its own
        rank."""
        return "{e}" in self.megatron


@dataclass(frozen=True)
class Family:
    """A model family: its table, and architecture settings that config.json does not contain.

    `qkv_bias` and `qk_norm` are a key of config.json if the family has models of both kinds. `rotary_fraction` is the
    default for the rotated part of a head. Families with 1 rotate whole heads only. `ignored` are HF names that may be
    in a checkpoint but that the model does not use. `model_args`: Megatron's flag (`post_mlp_layernorm`) -> its value
    for every model of the family, or a function of config.json; slime.config.model_args compares flags with it.
    """

    name: str
    rows: tuple[Row, ...]
    qkv_bias: bool | str
    qk_norm: bool | str
    ignored: tuple[str, ...] = ()
    rotary_fraction: float = 1.0
    model_args: Mapping[str, Any] = field(default_factory=dict)

    def find(self, parameter: str) -> tuple[Row, tuple[str, ...]]:
        """The row of a Megatron parameter, and its HF names with the numbers filled in. KeyError without a row."""
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
