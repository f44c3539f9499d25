"""The trainer's side: the last published weights in host memory, and what changed since."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from slime.weight_sync.channel import Export
from slime.weight_sync.delta.payload import encode, octets


class Snapshot:
    """Of one trainer rank. Rank 0 keeps the weights: one copy of the model in host memory. The other ranks only take
    part in the export.

    `encoding`, `checksum`: values of the flags --update-weight-delta-*.
    """

    def __init__(self, encoding: str, checksum: str) -> None:
        self._encoding, self._checksum = encoding, checksum
        self._tensors: dict[str, Tensor] = {}
        self._room = torch.empty(0, dtype=torch.uint8)
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
        self.changed_bytes = self.total_bytes = 0
        for name, tensor in export.whole():
            new = self._on_host(tensor.detach())
            old = self._tensors[name]
            if (new.dtype, new.shape) != (old.dtype, old.shape):
                raise RuntimeError(
                    f"{name} must keep its dtype and shape, got {new.dtype} {list(new.shape)} after {old.dtype} "
                    f"{list(old.shape)}"
                )
            payload, changed = encode(
                *(octets(old), octets(new), new.dtype.itemsize), by=self._encoding, checked_by=self._checksum
            )
            old.copy_(new)
            self.changed_bytes += changed
            self.total_bytes += new.nbytes
            yield name, payload

    def _on_host(self, tensor: Tensor) -> Tensor:
        """The tensor in host memory, until the next call. One buffer serves all: with one for each tensor, payloads
        would take the places between freed ones, and the heap would grow by the size of the model."""
        if tensor.device.type == "cpu":
            return tensor.contiguous()
        if self._room.nbytes < tensor.nbytes:
            self._room = torch.empty(tensor.nbytes, dtype=torch.uint8)
        room = self._room[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        return room.copy_(tensor)
