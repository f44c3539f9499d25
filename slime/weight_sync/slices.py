"""Slices of the weights, which a trainer rank publishes. All ranks together have each value once."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Generic, TypeVar

import torch
from torch import Tensor

from slime.weight_sync.ranks import everywhere

T = TypeVar("T")
Where = tuple[tuple[int, int], ...]
"""The first and the end index per axis of a tensor. JSON turns these tuples into lists."""


@dataclass(frozen=True)
class SlicePosition:
    """The position of a slice in its tensor."""

    name: str
    """HF name of the tensor."""
    dtype: str
    """Dtype as torch names it, such as "bfloat16"."""
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    where: Where

    @property
    def itemsize(self) -> int:
        kind: torch.dtype = getattr(torch, self.dtype)
        return kind.itemsize

    @property
    def nbytes(self) -> int:
        return math.prod(end - start for start, end in self.where) * self.itemsize

    @property
    def whole_bytes(self) -> int:
        return math.prod(self.shape) * self.itemsize

    def of(self, whole: Tensor) -> Tensor:
        """Returns the view of the slice in `whole`."""
        return whole[tuple(slice(start, end) for start, end in self.where)]

    def runs(self) -> tuple[int, Iterator[int]]:
        """Returns the slice as runs of bytes that are contiguous in the whole tensor: the length of a run, and the
        runs' first bytes in the order of the slice's values."""
        if not self.shape:
            return self.itemsize, iter((0,))
        strides = [math.prod(self.shape[axis + 1 :]) * self.itemsize for axis in range(len(self.shape))]
        # Axes after the last cut axis are whole, so a run covers them.
        cut = max((a for a, size in enumerate(self.shape) if self.where[a] != (0, size)), default=0)
        start, end = self.where[cut]
        outer = product(*(range(*bounds) for bounds in self.where[:cut]))
        firsts = (
            sum(i * stride for i, stride in zip((*index, start), strides, strict=False)) for index in outer
        )
        return (end - start) * strides[cut], firsts


@dataclass(frozen=True)
class Slice:
    """A part of a tensor, on any device. `values` reads it and may copy it from the host of an offloaded model, so
    callers call it once and do not keep its result."""

    position: SlicePosition
    values: Callable[[], Tensor]
    """Returns the values in the order of `position`. They may have more axes than `position`: a view of rows that
    are not contiguous."""


def whole_slices(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[Slice]:
    """Yields whole tensors, by HF name, as slices."""
    for name, tensor in tensors:
        where = tuple((0, size) for size in tensor.shape)
        dtype = str(tensor.dtype).removeprefix("torch.")
        yield Slice(SlicePosition(name, dtype, tuple(tensor.shape), where), lambda tensor=tensor: tensor)  # type: ignore[misc]


class OfAllRanks(Generic[T]):
    """A value that is derived from all ranks' slices. `make` gets the slices' `SlicePosition`s, one list per rank.
    It is called when a rank's slices differ from the last update. Otherwise the ranks only exchange that their slices
    are unchanged."""

    def __init__(self, make: Callable[[list[list[SlicePosition]]], T]) -> None:
        self._make = make
        self._mine: list[SlicePosition] | None = None
        self._made: list[T] = []

    def get(self, mine: list[SlicePosition]) -> T:
        """Returns the derived value. Collective. `mine` has the `SlicePosition`s on this rank. Raises RuntimeError
        unless all ranks' slices together cover each tensor."""
        if any(everywhere(mine != self._mine)):
            self._mine = None  # after an error, all ranks send each `SlicePosition` again
            of_ranks = everywhere(mine)
            require_whole(position for positions in of_ranks for position in positions)
            self._made = [self._make(of_ranks)]
            self._mine = mine
        return self._made[0]


def require_whole(positions: Iterable[SlicePosition]) -> None:
    """Raises RuntimeError unless the slices have the same number of values as their tensors."""
    covered: dict[str, tuple[SlicePosition, int]] = {}
    for position in positions:
        first, before = covered.setdefault(position.name, (position, 0))
        if (first.shape, first.dtype) != (position.shape, position.dtype):
            raise RuntimeError(
                f"{position.name} must have one shape and dtype on all ranks, got {list(first.shape)} {first.dtype} "
                f"and {list(position.shape)} {position.dtype}; report this as a bug"
            )
        covered[position.name] = first, before + position.nbytes
    for name, (first, found) in covered.items():
        if found != first.whole_bytes:
            raise RuntimeError(
                f"the ranks must publish each value of {name} once, got {found} of {first.whole_bytes} bytes; report "
                "this as a bug"
            )
