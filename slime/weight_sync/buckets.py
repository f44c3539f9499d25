"""Tensors packed into flat buckets of bytes: what a part of an update is where no file is written."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

from torch import Tensor

from slime.protocols import WeightUpdate

ALIGNMENT = 256
"""Bytes: any dtype may begin here, and copies of whole cache lines follow each other."""

Export = Callable[[], Iterable[tuple[str, Tensor]]]
"""All weights under their HF names, from the first again with every call. Collective over trainer ranks."""


class WeightChannel(Protocol):
    """One way for weights to reach engines."""

    def parts(
        self, export: Export, version: int, *, compare: bool, receivers: dict[str, int]
    ) -> Iterator[WeightUpdate]:
        """The parts of `version`, each valid until the one after the next is asked for. Collective over trainer ranks;
        rank 0's parts tell engines what to do. With `compare` (--check-weight-update-equal) engines are given what
        they need to compare their weights with the trainer's. `receivers`: the workers of each engine, by its name."""
        ...


def grouped(tensors: Iterable[tuple[str, Tensor]], limit: int) -> Iterator[list[tuple[str, Tensor]]]:
    """Consecutive tensors whose sizes add up to at most `limit` bytes, or one that is larger."""
    group: list[tuple[str, Tensor]] = []
    total = 0
    for name, tensor in tensors:
        size = aligned(tensor.nbytes)
        if group and total + size > limit:
            yield group
            group, total = [], 0
        group.append((name, tensor))
        total += size
    if group:
        yield group


def aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def room_for(tensors: list[tuple[str, Tensor]]) -> int:
    """Bytes that `fill` takes."""
    return sum(aligned(tensor.nbytes) for _, tensor in tensors)


def fill(bucket: Tensor, tensors: list[tuple[str, Tensor]]) -> list[list[Any]]:
    """Copy the tensors in: [name, dtype, shape, first byte] of each. `bucket` is uint8, of `room_for` them or more."""
    entries, offset = [], 0
    for name, tensor in tensors:
        room = bucket[offset : offset + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        room.copy_(tensor)
        dtype = str(tensor.dtype).removeprefix("torch.")
        entries.append([name, dtype, list(tensor.shape), offset])
        offset += aligned(tensor.nbytes)
    return entries
