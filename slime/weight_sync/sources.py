"""Buckets that several trainer ranks send: the positions of slices in a bucket, and the whole tensors on the receiving
side.

    bucket    | slices of rank 0 | slices of rank 1 | ...      each rank sends its region, in rank order

A bucket has all slices of its tensors, so a receiver needs memory for one bucket and one whole tensor.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from slime.weight_sync.buckets import aligned, view
from slime.weight_sync.slices import Slice, SlicePosition, Where

Pieces = list[tuple[Where, int]]
"""A slice's position in its tensor, and its first byte in the bucket."""
Entry = tuple[str, str, list[int], Pieces]
"""HF name, dtype and shape of a whole tensor, and its slices. JSON turns an entry into lists."""
Region = tuple[int, int, int]
"""The rank that sends the region, its first byte in the bucket, and its number of bytes."""


@dataclass(frozen=True)
class SlicedBucket:
    """The content of a bucket."""

    tensors: list[Entry]
    regions: list[Region]
    own: list[tuple[int, int]]
    """Index of a slice on this rank, and its first byte in the bucket."""
    nbytes: int
    """Bytes of the bucket."""
    weights_bytes: int


def sliced_buckets(
    of_ranks: Sequence[Sequence[SlicePosition]], rank: int, limit: int
) -> Iterator[SlicedBucket]:
    """Yields the buckets of an update, of at most `limit` bytes each unless a tensor is larger. `of_ranks`
    has each rank's slices as a list of `SlicePosition`, from which every rank computes the same buckets. `rank` is this
    rank. Layers follow each other in order, on whichever rank they are: an engine keeps the received tensors of a layer
    until the layer is complete."""
    by_name: dict[str, list[tuple[int, int, SlicePosition]]] = {}
    for source, positions in enumerate(of_ranks):
        for number, position in enumerate(positions):
            by_name.setdefault(position.name, []).append((source, number, position))
    group: list[tuple[int, int, SlicePosition]] = []
    total = 0
    for name in sorted(by_name, key=_in_order):
        size = sum(aligned(position.nbytes) for _, _, position in by_name[name])
        if group and total + size > limit:
            yield _sliced(group, rank)
            group, total = [], 0
        group += by_name[name]
        total += size
    if group:
        yield _sliced(group, rank)


def _in_order(name: str) -> list[tuple[int, str]]:
    """Returns a sort key that orders layer 2 before layer 10."""
    return [(int(word), "") if word.isdigit() else (-1, word) for word in re.split(r"(\d+)", name)]


def _sliced(group: list[tuple[int, int, SlicePosition]], rank: int) -> SlicedBucket:
    tensors: dict[str, Entry] = {}
    regions: list[Region] = []
    own, offset = [], 0
    for source, number, position in sorted(group, key=lambda found: found[:2]):
        if not regions or regions[-1][0] != source:
            regions.append((source, offset, 0))
        _, _, _, pieces = tensors.setdefault(
            position.name, (position.name, position.dtype, list(position.shape), [])
        )
        pieces.append((position.where, offset))
        if source == rank:
            own.append((number, offset))
        offset += aligned(position.nbytes)
        regions[-1] = source, regions[-1][1], offset - regions[-1][1]
    return SlicedBucket(
        list(tensors.values()), regions, own, offset, sum(position.nbytes for _, _, position in group)
    )


def fill_own(bucket: Tensor, of: SlicedBucket, slices: Sequence[Slice]) -> None:
    """Copies this rank's slices to their offsets in `bucket`, which is uint8."""
    for number, offset in of.own:
        values = slices[number].values()
        bucket[offset : offset + values.nbytes].view(values.dtype).view(values.shape).copy_(values)


def whole_tensor(bucket: Tensor, entry: Entry) -> Tensor:
    """Returns a tensor of a bucket: a view if it has one slice, otherwise a copy. Raises ValueError for a slice outside
    the bucket, and unless the slices have each value once."""
    name, dtype, shape, pieces = entry
    sizes = [[end - start for start, end in where] for where, _ in pieces]
    if sum(map(math.prod, sizes)) != math.prod(shape):
        raise ValueError(
            f"{name} must come whole, got slices of {sizes} for a tensor of {shape}; trainer and engine must have the "
            "same version"
        )
    found = [view(bucket, name, dtype, size, first) for size, (_, first) in zip(sizes, pieces, strict=True)]
    if len(found) == 1:
        return found[0]
    whole = torch.empty(shape, dtype=getattr(torch, dtype), device=bucket.device)
    for values, (where, _) in zip(found, pieces, strict=True):
        whole[tuple(slice(start, end) for start, end in where)] = values
    return whole


def by_name(tensors: Sequence[Entry]) -> Mapping[str, Entry]:
    return {entry[0]: entry for entry in tensors}
