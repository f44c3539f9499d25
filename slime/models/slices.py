"""Which slices of HF tensors a rank needs. They follow from a row's layout: nothing is cut by a second rule.

torch is imported only to compute.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from types import EllipsisType
from typing import TYPE_CHECKING, Protocol, TypeAlias

from slime.models.layouts import Layout, Sizes

if TYPE_CHECKING:
    from torch import Tensor


Where: TypeAlias = EllipsisType | int | slice | tuple[int | slice, ...]
"""An index of a stored tensor."""


class Stored(Protocol):
    """A tensor in a file. Only what is indexed is read: `stored[2:4]`, `stored[...]`. A `Tensor` is one, too."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def __getitem__(self, where: Where) -> Tensor: ...


@dataclass(frozen=True)
class Piece:
    """Rows (or columns) of a rank's part, and where they are in a file."""

    axis: int
    """0: rows, 1: columns."""
    target: int
    """The first of them in the rank's part."""
    size: int
    """Their number."""
    part: int | None
    """The number of the HF tensor. None: they are zero."""
    source: int
    """The first of them in the HF tensor."""

    @property
    def where(self) -> tuple[slice, ...]:
        """The index of the HF tensor."""
        return (*(slice(None),) * self.axis, slice(self.source, self.source + self.size))

    def of(self, parameter: Tensor) -> Tensor:
        """The view of the rank's part."""
        return parameter.narrow(self.axis, self.target, self.size)


@lru_cache(maxsize=1024)
def pieces(
    layout: Layout, shapes: tuple[tuple[int, ...], ...], sizes: Sizes, rank: int, ranks: int
) -> tuple[Piece, ...]:
    """The slices of HF tensors of `shapes` that tensor-parallel rank `rank` of `ranks` holds, in the order of its part.

    The rows of all HF tensors are numbered, and `layout` joins and shards the numbers as if they were the rows.
    """
    import torch

    axis = layout.axis or 0
    lengths = [shape[axis] for shape in shapes]
    ends = torch.tensor(lengths).cumsum(0)
    numbers, first = [], 1  # 0 is a row of padding
    for shape, length in zip(shapes, lengths, strict=True):
        alone = [1] * len(shape)
        alone[axis] = length
        numbers.append(torch.arange(first, first + length).view(alone))
        first += length
    mine = layout.shard(layout.join(numbers, sizes), rank, ranks).flatten()
    parts = torch.where(mine == 0, -1, torch.searchsorted(ends, mine))
    step = torch.where(mine[1:] == 0, 0, 1)
    new = (mine[1:] - mine[:-1] != step) | (parts[1:] != parts[:-1])
    starts = [0, *(new.nonzero()[:, 0] + 1).tolist()]
    return tuple(_found(axis, starts, mine.tolist(), parts.tolist(), ends.tolist(), lengths))


def _found(
    axis: int, starts: list[int], mine: list[int], parts: list[int], ends: list[int], lengths: list[int]
) -> Iterator[Piece]:
    for start, end in zip(starts, [*starts[1:], len(mine)], strict=True):
        if (part := parts[start]) < 0:
            yield Piece(axis, start, end - start, None, 0)
        else:
            yield Piece(axis, start, end - start, part, mine[start] - 1 - (ends[part] - lengths[part]))
