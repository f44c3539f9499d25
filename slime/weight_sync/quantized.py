"""Quantises the weights of an update to the scheme of the checkpoint that engines serve.

Each trainer rank quantises its own slices, so an update has the bytes of the checkpoint, and engines load it with the
loader of the checkpoint. The checkpoint's files decide which weights are quantised, and the dtype of their scales.

A block of fp8 may lie on two ranks. The ranks then exchange the largest values of such blocks before they quantise. The
scale of a block belongs to the rank with the block's first element. A group of int4 must lie on one rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from slime.models.quantized.int4 import PER_WORD
from slime.models.quantized.quantization import (
    QuantizationScheme,
    block_maxima,
    check_groups,
    quantize,
    scales_from,
    to_fp8,
)
from slime.models.quantized.quantized_checkpoint import QuantizedWeights
from slime.weight_sync.channel import Export, Named
from slime.weight_sync.ranks import everywhere
from slime.weight_sync.slices import Slice, SlicePosition, Where


def quantize_slices(slices: Iterable[Slice], weights: QuantizedWeights) -> Iterator[Slice]:
    """Returns the quantised form of this rank's slices. Collective."""
    mine = list(slices)
    shared = _shared_maxima(_find_unaligned(mine, weights), weights.scheme)
    return (part for each in mine for part in _parts(each, shared, weights))


def _find_unaligned(mine: list[Slice], weights: QuantizedWeights) -> list[Slice]:
    """Returns the slices with a part of a block. Raises ValueError for a part of a group of int4."""
    found, scheme = [], weights.scheme
    for each in mine:
        if each.position.name not in weights.names:
            continue
        check_groups(each.position.shape, scheme, each.position.name)
        if _is_aligned(each.position, scheme):
            continue
        if scheme.kind == "int4":
            raise ValueError(
                f"{each.position.name} must have whole groups of {scheme.block[1]} on each trainer rank, got "
                f"columns {list(each.position.where[1])} of {each.position.shape[1]}; lower "
                "--expert-tensor-parallel-size or --tensor-model-parallel-size"
            )
        found.append(each)
    return found


def _parts(each: Slice, shared: dict[str, Tensor], weights: QuantizedWeights) -> Iterator[Slice]:
    position, scheme = each.position, weights.scheme
    if position.name not in weights.names:
        yield each
        return
    found = _QuantizedSlice(each, scheme, weights.scale_dtype, shared.get(position.name))
    module = position.name.removesuffix("weight")
    (top, bottom), (left, right) = position.where
    packed = PER_WORD if scheme.kind == "int4" else 1
    yield Slice(
        SlicePosition(
            f"{module}{scheme.weight}",
            "int32" if packed > 1 else scheme.kind,
            (position.shape[0], position.shape[1] // packed),
            ((top, bottom), (left // packed, right // packed)),
        ),
        found.codes,
    )
    where = _slice_scales(position, scheme)
    if all(start < end for start, end in where):
        grid = scheme.grid(position.shape)
        yield Slice(
            SlicePosition(f"{module}{scheme.scale}", weights.scale_dtype, grid, where),
            partial(found.scales, where),
        )
    if packed > 1 and top == left == 0:
        shape = torch.tensor(position.shape, dtype=torch.int64)
        yield Slice(SlicePosition(f"{module}weight_shape", "int64", (2,), ((0, 2),)), lambda: shape)


class _QuantizedSlice:
    """The quantised form of one slice. A channel reads the codes and then the scales, so the scales of the last
    computation are kept until they are read."""

    def __init__(
        self, source: Slice, scheme: QuantizationScheme, scale_dtype: str, maxima: Tensor | None
    ) -> None:
        self._source, self._scheme, self._scale_dtype, self._maxima = source, scheme, scale_dtype, maxima
        self._kept: Tensor | None = None

    def codes(self) -> Tensor:
        codes, self._kept = self._computed()
        return codes

    def scales(self, where: Where) -> Tensor:
        """Returns the scales at `where` of the whole weight's scales."""
        scales, self._kept = self._kept, None
        if scales is None:
            _, scales = self._computed()
        first = _first_block(self._source.position, self._scheme)
        return scales[
            tuple(slice(start - at, end - at) for (start, end), at in zip(where, first, strict=True))
        ]

    def _computed(self) -> tuple[Tensor, Tensor]:
        """Returns the codes of the slice, and the scales of all blocks that it touches."""
        position, scheme = self._source.position, self._scheme
        values = _values(self._source)
        if self._maxima is None:
            found = quantize(values, scheme, name=position.name, scale_dtype=self._scale_dtype)
            return found[scheme.weight], found[scheme.scale]
        first, count = _first_block(position, scheme), scheme.grid(position.shape)
        ends = [
            -(-end // size) for (_, end), size in zip(position.where, _sizes(position, scheme), strict=True)
        ]
        maxima = self._maxima[first[0] : min(ends[0], count[0]), first[1] : min(ends[1], count[1])]
        kind = getattr(torch, self._scale_dtype)
        scales = scales_from(maxima.to(values.device), scheme).to(kind)
        return to_fp8(values, scales, _whole(position, scheme), _offset(position, scheme)), scales


def quantize_export(export: Export, weights: QuantizedWeights) -> Export:
    """Returns the quantised form of the weights that a rank publishes."""
    whole, own = export.whole, export.own
    return Export(
        None if whole is None else lambda: _whole_tensors(whole(), weights),
        None if own is None else lambda: quantize_slices(own(), weights),
    )


def _whole_tensors(tensors: Iterable[Named], weights: QuantizedWeights) -> Iterator[Named]:
    for name, tensor in tensors:
        yield from weights.quantize(name, tensor).items()


def _shared_maxima(unaligned: list[Slice], scheme: QuantizationScheme) -> dict[str, Tensor]:
    """Returns the largest values of all blocks of the weights that ranks cut inside a block, by HF name. Collective:
    all ranks exchange those of their slices."""
    mine = [
        (
            each.position,
            block_maxima(_values(each), _whole(each.position, scheme), _offset(each.position, scheme)).cpu(),
        )
        for each in unaligned
    ]
    found: dict[str, Tensor] = {}
    for of_rank in everywhere(mine):
        for position, maxima in of_rank:
            whole = found.setdefault(position.name, torch.zeros(scheme.grid(position.shape)))
            row, column = _first_block(position, scheme)
            part = whole[row : row + maxima.shape[0], column : column + maxima.shape[1]]
            torch.maximum(part, maxima, out=part)
    return found


def _values(each: Slice) -> Tensor:
    return each.values().detach().reshape([end - start for start, end in each.position.where])


def _sizes(position: SlicePosition, scheme: QuantizationScheme) -> list[int]:
    """Returns the rows and columns of a block."""
    return [size or whole for size, whole in zip(scheme.block, position.shape, strict=True)]


def _whole(position: SlicePosition, scheme: QuantizationScheme) -> QuantizationScheme:
    """Returns the scheme with the sizes of a block of the whole weight, because a slice has smaller axes."""
    rows, columns = _sizes(position, scheme)
    return replace(scheme, block=(rows, columns))


def _is_aligned(position: SlicePosition, scheme: QuantizationScheme) -> bool:
    """Returns True if each block belongs to one slice."""
    return all(
        start % size == 0 and (end % size == 0 or end == whole)
        for (start, end), size, whole in zip(
            position.where, _sizes(position, scheme), position.shape, strict=True
        )
    )


def _offset(position: SlicePosition, scheme: QuantizationScheme) -> tuple[int, int]:
    """Returns the position of a slice's first element in its block."""
    (top, _), (left, _) = position.where
    rows, columns = _sizes(position, scheme)
    return top % rows, left % columns


def _first_block(position: SlicePosition, scheme: QuantizationScheme) -> tuple[int, int]:
    """Returns the index of the first block that a slice touches."""
    (top, _), (left, _) = position.where
    rows, columns = _sizes(position, scheme)
    return top // rows, left // columns


def _slice_scales(position: SlicePosition, scheme: QuantizationScheme) -> Where:
    """Returns the position of the scales of the blocks whose first element is in the slice."""
    return tuple(
        (-(-start // size), -(-end // size))
        for (start, end), size in zip(position.where, _sizes(position, scheme), strict=True)
    )
