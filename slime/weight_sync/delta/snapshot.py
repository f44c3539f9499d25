"""The trainer's side: each rank keeps its part of the last published weights in host memory, and computes the changes
since.

A rank keeps and compares its own slices. It makes a record per slice, and the payload of a tensor has
all its slices' records, one after the other in the order of the ranks. So a payload is itself a tensor whose slices the
ranks send, and every channel that takes slices of weights also takes slices of payloads.
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
from slime.weight_sync.slices import Slice, SlicePosition


@dataclass(frozen=True)
class Delta:
    """The changes in one update."""

    slices: list[Slice]
    """This rank's slices of the payloads, by the HF names of the tensors."""
    tensors: int
    """Number of payloads over all ranks."""
    density: float
    """Share of the bytes on all ranks that belong to changed values."""


Record = tuple[SlicePosition, Tensor, int]
"""Position of a slice, its record, and its number of bytes in changed values."""


class Snapshot:
    """The values of a trainer rank's own slices, in host memory.

    `encoding`, `checksum`: values of the flags --update-weight-delta-*.
    """

    def __init__(self, encoding: str, checksum: str) -> None:
        self._encoding, self._checksum = encoding, checksum
        self._kept: dict[SlicePosition, Tensor] = {}
        self._buffers = [torch.empty(0, dtype=torch.uint8)] * TENSORS

    def taken(self, export: Export) -> Iterator[Slice]:
        """Yields this rank's slices and makes them the snapshot. Each slice is copied when its values are read."""
        self._kept = {}
        for each in export.slices():
            yield Slice(each.position, partial(self._keep, each))

    def _keep(self, each: Slice) -> Tensor:
        kept = each.values().detach().to("cpu", copy=True).contiguous()
        self._kept[each.position] = kept
        return kept

    def delta(self, export: Export) -> Delta:
        """Computes the changes in this rank's slices and stores the new weights in the snapshot. Collective: ranks
        exchange the sizes of their records. An error on one rank is raised on all ranks."""
        with on_all_ranks("compare their weights with the last version"):
            records = list(self._records(export))
        mine = [(position.name, record.nbytes) for position, record, _ in records]
        changed = sum(of_values for _, _, of_values in records)
        of_ranks = everywhere((mine, changed, sum(position.nbytes for position, _, _ in records)))
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
                SlicePosition(
                    position.name, "uint8", (ends[position.name],), ((start, start + record.nbytes),)
                ),
                partial(_return_record, record),
            )
            for start, (position, record, _) in zip(starts, records, strict=True)
        ]
        share = sum(of_values for _, of_values, _ in of_ranks) / max(1, sum(total for *_, total in of_ranks))
        return Delta(slices, len(ends), share)

    def _records(self, export: Export) -> Iterator[Record]:
        """Yields records. Threads compare the last slices while the next slice is read and copied to the host."""
        running: deque[Future[Record]] = deque()
        for number, each in enumerate(export.slices()):
            if len(running) == TENSORS:  # the oldest comparison uses the buffer that this slice needs
                yield running.popleft().result()
            old = self._kept.get(each.position)
            if old is None:
                name = each.position.name
                before = ", ".join(_describe_position(one) for one in self._kept if one.name == name)
                raise RuntimeError(
                    f"{name} must keep its dtype, shape and slices, got {_describe_position(each.position)} after "
                    f"{before}"
                )
            new = self._on_host(each.values().detach(), number % TENSORS)
            running.append(for_tensors().submit(self._compared, each.position, old, new))
        for record in running:
            yield record.result()

    def _compared(self, position: SlicePosition, old: Tensor, new: Tensor) -> Record:
        """Returns the record from `old` to `new`, and copies the new values into `old`."""
        record, changed = encode(
            octets(old), octets(new), position, by=self._encoding, checked_by=self._checksum
        )
        octets(old)[:] = octets(new)
        return position, record, changed

    def _on_host(self, tensor: Tensor, position: int) -> Tensor:
        """Returns the tensor in host memory, valid until the next call with the same buffer index `position`. A few
        buffers serve all slices. With a buffer per slice, records would fill the gaps between freed buffers, and the
        heap would grow by the size of the shard."""
        if tensor.device.type == "cpu":
            return tensor.contiguous()
        if self._buffers[position].nbytes < tensor.nbytes:
            self._buffers[position] = torch.empty(tensor.nbytes, dtype=torch.uint8, pin_memory=True)
        buffer = self._buffers[position][: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        return buffer.copy_(tensor)


def _return_record(record: Tensor) -> Tensor:
    return record


def _describe_position(position: SlicePosition) -> str:
    return f"{position.dtype} {list(position.shape)} at {[list(bounds) for bounds in position.where]}"
