"""The part of the live model that a rank publishes: its own slices of the HF tensors. Ranks do not communicate for it.

The slices of a shard are those that loading reads (slime.models.slices). Ranks with the same shard share the work: the
rank that has published the fewest bytes so far publishes the next parameter. All ranks compute this from the shapes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import cached_property, partial

import torch
from megatron.core import parallel_state
from torch import Tensor, nn

from slime.megatron_backend.checkpoint.live_table import hf_parts, parameters, rank_and_size, shard_group
from slime.megatron_backend.checkpoint.weights import Read, live
from slime.megatron_backend.model.gpt import HiddenGPTModel, unwrapped
from slime.models import family_for
from slime.models.family import Written
from slime.models.layouts import Row
from slime.models.slices import Piece, pieces
from slime.weight_sync.slices import Slice, SlicePosition, Where


class _Last:
    """Reads parameters, and keeps the last values, because the slices of a parameter are written one after the
    other."""

    def __init__(self, read: Read) -> None:
        self._read = read
        self._found: tuple[Tensor, Tensor] | None = None

    def __call__(self, parameter: Tensor) -> Tensor:
        if self._found is None or self._found[0] is not parameter:
            self._found = None  # free its memory before the next read
            with torch.no_grad():
                self._found = parameter, self._read(parameter)
        return self._found[1]


class _PublisherChoice:
    """Selects, among the ranks with the same values, the rank that publishes a parameter."""

    def __init__(self) -> None:
        self._published: dict[tuple[bool, int], list[int]] = defaultdict(list)

    def is_mine(self, parameter: Tensor, row: Row) -> bool:
        rank, ranks = rank_and_size(
            parallel_state.get_expert_data_parallel_group()
            if row.is_expert
            else parallel_state.get_data_parallel_group(with_context_parallel=True)
        )
        if row.layout.axis is None:  # the shards are equal
            shard, shards = rank_and_size(shard_group(row))
            rank, ranks = rank * shards + shard, ranks * shards
        published = self._published[row.is_expert, ranks] = (
            self._published[row.is_expert, ranks] or [0] * ranks
        )
        turn = published.index(min(published))
        published[turn] += parameter.nbytes
        return turn == rank


_Own = tuple[SlicePosition, Tensor, Callable[[Tensor], Tensor]]
"""A slice: its position, its parameter, and the function that returns its view or copy of the parameter's values."""


class OwnSlices:
    """The slices of this rank, by HF name. All ranks together have each value that `export_hf` yields, once.

    Positions and views follow from the model's shapes, so they are computed in the first call and kept for all updates.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def __call__(self, read: Read = live) -> Iterator[Slice]:
        """Yields the slices. `read` is as in `export_hf` and runs when a slice's values are read. The values need the
        memory of a parameter on this rank, or are the live parameter itself."""
        last = _Last(read)  # values of the previous update would be old
        for position, parameter, of in self._own:
            yield Slice(position, partial(_values, last, parameter, of))

    @cached_property
    def _own(self) -> list[_Own]:
        turns = _PublisherChoice()
        return [
            own
            for inner in unwrapped(self._model)
            for parameter, row, names in parameters(inner)
            # Megatron marks the embedding's copy for a tied head
            if not getattr(parameter, "shared", False) and turns.is_mine(parameter, row)
            for own in _slice_parameter(parameter, row, names, inner)
        ]


def _values(read: Read, parameter: Tensor, of: Callable[[Tensor], Tensor]) -> Tensor:
    return of(read(parameter))


def _slice_parameter(
    parameter: Tensor, row: Row, names: tuple[str, ...], inner: HiddenGPTModel
) -> Iterator[_Own]:
    family, hf = family_for(inner.hf_config), inner.hf_config
    wholes = hf_parts(parameter, row, inner)
    rank, ranks = rank_and_size(shard_group(row))
    dtype = str(parameter.dtype).removeprefix("torch.")
    written = family.written(names[0], wholes[0], hf)
    shapes = tuple(tuple(whole.shape) for whole in wholes)
    if written.keeps_order:
        for piece in pieces(row.layout, shapes, inner.sizes, rank, ranks):
            where, part = _stacked_piece(piece, row, written, names[0], wholes[0], inner)
            yield SlicePosition(written.name, dtype, written.shape, where), parameter, part
        return
    if written.number is not None:
        mine = family.written(names[0], parameter.data.to("meta"), hf).tensor.shape
        where = ((written.number, written.number + 1), *_cut(tuple(mine), written.shape[1:], rank))
        position = SlicePosition(written.name, dtype, written.shape, where)
        yield position, parameter, lambda values: family.written(names[0], values, hf).tensor[None]
        return
    for piece in pieces(row.layout, shapes, inner.sizes, rank, ranks):
        if piece.part is not None:  # other pieces are padding
            position = SlicePosition(
                names[piece.part], dtype, shapes[piece.part], _where(piece, shapes[piece.part])
            )
            yield position, parameter, partial(_read_piece, row, piece)


def _stacked_piece(
    piece: Piece, row: Row, written: Written, name: str, whole: Tensor, inner: HiddenGPTModel
) -> tuple[Where, Callable[[Tensor], Tensor]]:
    """Returns the position of a piece in a stack whose tensors keep their order, and the function that returns its
    values."""
    family, hf = family_for(inner.hf_config), inner.hf_config
    part = whole.narrow(piece.axis, piece.source, piece.length)
    sizes = zip(family.written(name, part, hf).tensor.shape, written.tensor.shape, strict=True)
    bounds = ((0, of) if size == of else (piece.source, piece.source + size) for size, of in sizes)
    assert written.number is not None

    def values(parameter: Tensor) -> Tensor:
        mine = _read_piece(row, piece, parameter).reshape(part.shape)
        return family.written(name, mine, hf).tensor[None]

    return ((written.number, written.number + 1), *bounds), values


def _read_piece(row: Row, piece: Piece, values: Tensor) -> Tensor:
    """Returns the rows of a piece, with their columns as in the files. Layouts that move columns also move them
    back."""
    return row.layout.columns(piece.of(values))


def _where(piece: Piece, shape: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    whole = [(0, size) for size in shape]
    whole[piece.axis] = piece.source, piece.source + piece.length
    return tuple(whole)


def _cut(mine: tuple[int, ...], whole: tuple[int, ...], rank: int) -> Iterator[tuple[int, int]]:
    """Yields the bounds per axis of tensor-parallel rank `rank`'s shard."""
    for size, of in zip(mine, whole, strict=True):
        yield (0, of) if size == of else (rank * size, (rank + 1) * size)
