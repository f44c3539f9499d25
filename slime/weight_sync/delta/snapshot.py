"""The trainer's side: the last published weights in host memory, and what changed since."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future

import torch
import torch.distributed as dist
from torch import Tensor

from slime.weight_sync.channel import Export
from slime.weight_sync.delta.payload import encode, octets
from slime.weight_sync.delta.threads import TENSORS, for_tensors


class Snapshot:
    """Of one trainer rank. Rank 0 keeps the weights: one copy of the model in host memory. The other ranks only take
    part in the export.

    `encoding`, `checksum`: values of the flags --update-weight-delta-*.
    """

    def __init__(self, encoding: str, checksum: str) -> None:
        self._encoding, self._checksum = encoding, checksum
        self._tensors: dict[str, Tensor] = {}
        self._rooms = [torch.empty(0, dtype=torch.uint8)] * TENSORS
        self._counting = threading.Lock()
        self.changed_bytes = self.total_bytes = 0
        """Of the last `payloads`: bytes of values that changed, and of all values. On rank 0."""

    def taken(self, export: Export) -> Iterator[tuple[str, Tensor]]:
        """All weights, which are the snapshot from now on. The tensors are the snapshot's own."""
        self._tensors = {}
        for name, tensor in export.whole():
            if dist.get_rank():
                yield name, tensor
                continue
            self._tensors[name] = tensor.detach().to("cpu", copy=True).contiguous()
            yield name, self._tensors[name]

    def payloads(self, export: Export) -> list[tuple[str, Tensor]]:
        """A payload for each tensor, on the host; the snapshot has the new weights afterwards. Collective: the other
        ranks get tensors of the same sizes without data, because all ranks count the same buckets."""
        if dist.get_rank():
            for _ in export.whole():
                pass
            sizes: list[list[tuple[str, int]]] = [[]]
            dist.broadcast_object_list(sizes)
            return [(name, torch.empty(size, dtype=torch.uint8, device="meta")) for name, size in sizes[0]]
        made = list(self._changes(export))
        dist.broadcast_object_list([[(name, payload.nbytes) for name, payload in made]])
        return made

    def _changes(self, export: Export) -> Iterator[tuple[str, Tensor]]:
        """Threads compare the last tensors while the next one is gathered and comes to the host."""
        self.changed_bytes = self.total_bytes = 0
        running: deque[tuple[str, Future[Tensor]]] = deque()
        for place, (name, tensor) in enumerate(export.whole()):
            if len(running) == TENSORS:  # the oldest one has the room of this tensor
                done, payload = running.popleft()
                yield done, payload.result()
            new = self._on_host(tensor.detach(), place % TENSORS)
            old = self._tensors[name]
            if (new.dtype, new.shape) != (old.dtype, old.shape):
                raise RuntimeError(
                    f"{name} must keep its dtype and shape, got {new.dtype} {list(new.shape)} after {old.dtype} "
                    f"{list(old.shape)}"
                )
            running.append((name, for_tensors().submit(self._encoded, old, new)))
        for name, payload in running:
            yield name, payload.result()

    def _encoded(self, old: Tensor, new: Tensor) -> Tensor:
        """The payload from `old` to `new`; `old` has the new values then."""
        payload, changed = encode(
            *(octets(old), octets(new), new.dtype.itemsize), by=self._encoding, checked_by=self._checksum
        )
        octets(old)[:] = octets(new)
        with self._counting:
            self.changed_bytes += changed
            self.total_bytes += new.nbytes
        return payload

    def _on_host(self, tensor: Tensor, place: int) -> Tensor:
        """The tensor in host memory, until the next call for this place. A few buffers serve all: with one for each
        tensor, payloads would take the places between freed ones, and the heap would grow by the size of the model."""
        if tensor.device.type == "cpu":
            return tensor.contiguous()
        if self._rooms[place].nbytes < tensor.nbytes:
            self._rooms[place] = torch.empty(tensor.nbytes, dtype=torch.uint8, pin_memory=True)
        room = self._rooms[place][: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        return room.copy_(tensor)
