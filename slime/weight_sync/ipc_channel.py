"""The IPC channel: engines on the trainer's own GPUs read its memory. Nothing but addresses travels.

Weights are packed into two buckets of device memory, in turns: while engines load one, the other is filled. What
engines are told of a bucket is plain data: names, shapes, offsets, and the handles by which CUDA maps the memory of
another process (cudaIpcMemHandle), by GPU. Owns the buckets; opening them is the engine's business.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from slime.protocols import WeightUpdate
from slime.weight_sync.buckets import Export, fill, grouped, room_for


class IpcChannel:
    """Publishes weights as parts that live until the part after the next is asked for.

    Every trainer rank packs all weights into buckets on its own GPU, in lockstep: each GPU's engine worker finds the
    bucket of that GPU. A bucket has `bucket_bytes`, or the size of the largest tensor so far: a larger one makes new
    buckets, and torch gives the old ones' memory back only when no engine has them mapped any more.
    """

    def __init__(self, bucket_bytes: int, device: torch.device) -> None:
        self.bucket_bytes, self.device = bucket_bytes, device
        self._buckets: list[Tensor] = []
        self._handles: list[dict[str, list[Any]]] = []

    def parts(
        self, export: Export, version: int, *, compare: bool, receivers: dict[str, int]
    ) -> Iterator[WeightUpdate]:
        """Parts of `version`, the memory of each ready when it is yielded. Collective over all ranks.

        With `compare` (--check-weight-update-equal) all weights come a second time, for engines to compare with what
        they have made of the first.
        """
        turn = 0
        for load in (True, False) if compare else (True,):
            for tensors in grouped(export(), self.bucket_bytes):
                size = room_for(tensors)
                if not self._buckets or self._buckets[0].nbytes < size:
                    self._allocate(max(size, self.bucket_bytes))
                entries = fill(self._buckets[turn], tensors)
                torch.cuda.synchronize(self.device)
                info = {"tensors": entries, "handles": self._handles[turn], "load": load}
                yield WeightUpdate(version, info, lasting=False)
                turn = 1 - turn

    def _allocate(self, size: int) -> None:
        """Two buckets, and the handles of all ranks' by the UUID of their GPUs."""
        self._buckets = [torch.empty(size, dtype=torch.uint8, device=self.device) for _ in range(2)]
        uuid = str(torch.cuda.get_device_properties(self.device).uuid)
        mine = [_handle(bucket) for bucket in self._buckets]
        of_ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(of_ranks, (uuid, mine))
        self._handles = [{uuid: handles[i] for uuid, handles in of_ranks} for i in range(2)]


def _handle(bucket: Tensor) -> list[Any]:
    """What torch needs to map the bucket's memory into another process, as JSON holds it.

    The tuple that torch's own sharing between processes pickles, without the index of the device, which differs from
    process to process: memory handle, size, offset, counter of users (handle, offset), event (handle, to be waited
    for).
    """
    _, *rest = bucket.untyped_storage()._share_cuda_()
    return [base64.b64encode(x).decode() if isinstance(x, bytes) else x for x in rest]
