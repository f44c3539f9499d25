"""The trainer's side: what each rank keeps of the last published weights in host memory, and what changed since.

A rank keeps and compares its own slices. Of each slice it makes a record, and the payload of a tensor has the records
of all its slices, one after the other in the order of the ranks. So a payload is itself a tensor that ranks give slices
of, and every channel that takes slices of weights takes those of payloads.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from slime.weight_sync.channel import Export
from slime.weight_sync.delta.payload import encode, octets
from slime.weight_sync.delta.threads import TENSORS, for_tensors
from slime.weight_sync.ranks import everywhere, on_all_ranks, own_rank
from slime.weight_sync.slices import Place, Slice


@dataclass(frozen=True)
class Delta:
    """What changed in one update."""

    slices: list[Slice]
    """This rank's slices of the payloads, by the HF names of the tensors."""
    tensors: int
    """The number of payloads, of all ranks together."""
    density: float
    """The share of all ranks' bytes that belong to values that changed."""


Record = tuple[Place, Tensor, int]
"""Of one slice: its place, its record, and its bytes of values that changed."""


class Snapshot:
    """Of one trainer rank: the values of its own slices, in host memory.

    `encoding`, `checksum`: values of the flags --update-weight-delta-*.
    """

    def __init__(self, encoding: str, checksum: str) -> None:
        self._encoding, self._checksum = encoding, checksum
        self._kept: dict[Place, Tensor] = {}
        self._rooms = [torch.empty(0, dtype=torch.uint8)] * TENSORS

    def taken(self, export: Export) -> Iterator[Slice]:
        """This rank's slices, which are the snapshot from now on. Each is copied when its values are asked for."""
        self._kept = {}
        for each in export.slices():
            yield Slice(each.place, partial(self._keep, each))

    def _keep(self, each: Slice) -> Tensor:
        kept = each.values().detach().to("cpu", copy=True).contiguous()
        self._kept[each.place] = kept
        return kept

    def delta(self, export: Export) -> Delta:
        """What changed in this rank's slices; the snapshot has the new weights afterwards. Collective: ranks tell each
        other the sizes of their records. An error of one rank is raised on all."""
        with on_all_ranks("compare their weights with the last version"):
            records = list(self._records(export))
        mine = [(place.name, record.nbytes) for place, record, _ in records]
        changed = sum(of_values for _, _, of_values in records)
        of_ranks = everywhere((mine, changed, sum(place.nbytes for place, _, _ in records)))
        ends: dict[str, int] = {}
        starts: list[int] = []
        for rank, (sizes, _, _) in enumerate(of_ranks):
            for name, size in sizes:
                start = ends.get(name, 0)
                ends[name] = start + size
                if rank == own_rank():
                    starts.append(start)
        slices = [
            Slice(
                Place(place.name, "uint8", (ends[place.name],), ((start, start + record.nbytes),)),
                partial(_given, record),
            )
            for start, (place, record, _) in zip(starts, records, strict=True)
        ]
        share = sum(of_values for _, of_values, _ in of_ranks) / max(1, sum(total for *_, total in of_ranks))
        return Delta(slices, len(ends), share)

    def _records(self, export: Export) -> Iterator[Record]:
        """Threads compare the last slices while the next one is read and comes to the host."""
        running: deque[Future[Record]] = deque()
        for number, each in enumerate(export.slices()):
            if len(running) == TENSORS:  # the oldest one has the room of this slice
                yield running.popleft().result()
            old = self._kept.get(each.place)
            if old is None:
                raise RuntimeError(
                    f"{each.place.name} must keep its dtype, shape and slices, got {_told(each.place)} after "
                    f"{', '.join(_told(place) for place in self._kept if place.name == each.place.name)}"
                )
            new = self._on_host(each.values().detach(), number % TENSORS)
            running.append(for_tensors().submit(self._compared, each.place, old, new))
        for record in running:
            yield record.result()

    def _compared(self, place: Place, old: Tensor, new: Tensor) -> Record:
        """The record from `old` to `new`; `old` has the new values then."""
        record, changed = encode(
            octets(old), octets(new), place, by=self._encoding, checked_by=self._checksum
        )
        octets(old)[:] = octets(new)
        return place, record, changed

    def _on_host(self, tensor: Tensor, place: int) -> Tensor:
        """The tensor in host memory, until the next call for this place. A few buffers serve all: with one for each
        slice, records would take the places between freed ones, and the heap would grow by the size of the shard."""
        if tensor.device.type == "cpu":
            return tensor.contiguous()
        if self._rooms[place].nbytes < tensor.nbytes:
            self._rooms[place] = torch.empty(tensor.nbytes, dtype=torch.uint8, pin_memory=True)
        room = self._rooms[place][: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        return room.copy_(tensor)


def _given(record: Tensor) -> Tensor:
    return record


def _told(place: Place) -> str:
    return f"{place.dtype} {list(place.shape)} at {[list(bounds) for bounds in place.where]}"
