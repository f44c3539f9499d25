"""Computes the slices of HF tensors that a rank needs. They follow from a row's layout, so no second rule cuts a
tensor.

torch is imported only to compute.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from types import EllipsisType
from typing import TYPE_CHECKING, Protocol, TypeAlias

from slime.models.layouts import Layout, Sizes

if TYPE_CHECKING:
    from torch import Tensor


Where: TypeAlias = EllipsisType | int | slice | tuple[int | slice, ...]
"""An index of a stored tensor."""


class Stored(Protocol):
    """A tensor in a file. Indexing reads only the indexed part: `stored[2:4]`, `stored[...]`. A `Tensor` also fits."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def __getitem__(self, where: Where) -> Tensor: ...


class Tensors(Protocol):
    """The tensors of a checkpoint in its files."""

    def names(self) -> set[str]: ...

    def get(self, name: str) -> Stored:
        """Returns the tensor `name`. Indexing it reads slices from the file. Quantised weights are dequantised, block
        by block of the slices."""
        ...

    def find_file(self, name: str) -> str:
        """Returns the file of a tensor, for messages."""
        ...


@dataclass(frozen=True)
class Piece:
    """Rows (or columns) of a rank's part, and their position in a file. They are contiguous in the file. In the rank's
    part they form `count` blocks at equal distances: the query heads of each group, for example."""

    axis: int
    """Axis: 0 for rows, 1 for columns."""
    target: int
    """First row in the rank's part."""
    size: int
    """Number of rows in a block."""
    part: int | None
    """Index of the HF tensor. None means that the rows are zero."""
    source: int
    """First row in the HF tensor."""
    count: int = 1
    """Number of blocks."""
    step: int = 0
    """Distance in rows from the start of a block to the start of the next block."""

    @property
    def length(self) -> int:
        """Returns the number of rows in all blocks."""
        return self.count * self.size

    @property
    def where(self) -> tuple[slice, ...]:
        """Returns the index of the HF tensor."""
        return (*(slice(None),) * self.axis, slice(self.source, self.source + self.length))

    @property
    def targets(self) -> list[int]:
        """Returns, for each row of the file, its row in the rank's part."""
        blocks = (self.target + block * self.step for block in range(self.count))
        return [first + row for first in blocks for row in range(self.size)]

    def of(self, parameter: Tensor) -> Tensor:
        """Returns the view of the rank's part. With several blocks, `axis` becomes two axes [count, size]. So the view
        has the order of the file's rows, and `reshape` converts between both shapes."""
        rows = parameter.narrow(self.axis, self.target, (self.count - 1) * self.step + self.size)
        if self.count == 1:
            return rows
        return rows.unfold(self.axis, self.size, self.step).movedim(-1, self.axis + 1)


@lru_cache(maxsize=1024)
def pieces(
    layout: Layout, shapes: tuple[tuple[int, ...], ...], sizes: Sizes, rank: int, ranks: int
) -> tuple[Piece, ...]:
    """Returns the slices of HF tensors of `shapes` that tensor-parallel rank `rank` of `ranks` holds, ordered by their
    first row in the rank's part.

    The function numbers all rows of the HF tensors, and `layout` joins and shards the numbers as if they were the rows.
    """
    import torch

    axis = layout.axis or 0
    lengths = [shape[axis] for shape in shapes]
    ends = torch.tensor(lengths).cumsum(0)
    numbers, first = [], 1  # 0 marks a row of padding
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
    return tuple(_joined(_found(axis, starts, mine.tolist(), parts.tolist(), ends.tolist(), lengths)))


def _found(
    axis: int, starts: list[int], mine: list[int], parts: list[int], ends: list[int], lengths: list[int]
) -> Iterator[Piece]:
    for start, end in zip(starts, [*starts[1:], len(mine)], strict=True):
        if (part := parts[start]) < 0:
            yield Piece(axis, start, end - start, None, 0)
        else:
            yield Piece(axis, start, end - start, part, mine[start] - 1 - (ends[part] - lengths[part]))


def _joined(found: Iterator[Piece]) -> list[Piece]:
    """Merges pieces whose rows follow each other in the file, at equal distances in the rank's part, into one piece."""
    whole: list[Piece] = []
    last: dict[int, int] = {}  # index in `whole` of an HF tensor's last piece
    for piece in found:
        before = None if piece.part is None or piece.part not in last else whole[last[piece.part]]
        if before is not None and (step := _step(before, piece)):
            assert piece.part is not None
            whole[last[piece.part]] = replace(before, count=before.count + 1, step=step)
            continue
        if piece.part is not None:
            last[piece.part] = len(whole)
        whole.append(piece)
    return whole


def _step(before: Piece, piece: Piece) -> int:
    """Returns the distance of `before`'s blocks if `piece` is its next block, or 0 if it cannot be."""
    step = piece.target - before.target - (before.count - 1) * before.step
    follows = piece.size == before.size and piece.source == before.source + before.length
    return step if follows and before.step in (0, step) else 0
