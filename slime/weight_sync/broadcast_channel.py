"""The broadcast channel: trainer rank 0 sends packed weights to all workers of all engines at once, over a process
group of their own: NCCL between GPUs, gloo between CPUs.

Bucket by bucket: engines are told what is in it, and take it while the trainer sends it. The group lives until the
engines that serve are others. Ranks of it: 0 the trainer, then the workers of the engines, in the pool's order.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from slime.protocols import WeightUpdate
from slime.weight_sync.buckets import Export, fill, grouped, room_for


def join(info: dict[str, Any], rank: int, device: torch.device) -> Any:
    """Become rank `rank` of the group that `info` tells of: {"store": file that all see, "world": ranks, "timeout_s"}.

    Returns when all have joined. Apart from torch's default group, if there is one.
    """
    store = dist.FileStore(info["store"], info["world"])
    timeout = timedelta(seconds=info["timeout_s"])
    if device.type != "cuda":
        return dist.ProcessGroupGloo(store, rank, info["world"], timeout)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(store, rank, info["world"], options)


class BroadcastChannel:
    """`directory`: where the group's file is put, seen by all hosts. `bucket_bytes` bounds a bucket, or the largest
    tensor does. `timeout_s`: how long the trainer waits for an engine that does not take its bucket.
    """

    def __init__(self, directory: Path, bucket_bytes: int, device: torch.device, timeout_s: float) -> None:
        self.directory, self.bucket_bytes, self.device = directory, bucket_bytes, device
        self.timeout_s = timeout_s
        self._group: Any = None
        self._info: dict[str, Any] = {}
        self._ranks: dict[str, int] | None = None
        self._bucket: Tensor | None = None

    def parts(
        self, export: Export, version: int, *, compare: bool, receivers: dict[str, int]
    ) -> Iterator[WeightUpdate]:
        """Parts of `version`; what a part tells of is sent when the next one is asked for.

        `receivers`: workers of each serving engine, by its name; at least one. Collective over all trainer ranks, of
        which rank 0 sends. With `compare` all weights are sent a second time, for engines to compare.
        """
        sends = dist.get_rank() == 0
        if self._ranks != receivers:
            self._invite(receivers)
        for load in (True, False) if compare else (True,):
            for tensors in grouped(export(), self.bucket_bytes):
                size = room_for(tensors)
                if self._bucket is None or self._bucket.nbytes < size:
                    self._bucket = torch.empty(
                        max(size, self.bucket_bytes), dtype=torch.uint8, device=self.device
                    )
                entries = fill(self._bucket, tensors) if sends else []
                info = {"tensors": entries, "bytes": size, "group": self._info, "load": load}
                yield WeightUpdate(version, info, lasting=False)
                if sends:
                    if self._group is None:
                        self._group = join(self._info, 0, self.device)
                    self._group.broadcast(self._bucket[:size], 0).wait()
                    if self.device.type == "cuda":
                        torch.cuda.synchronize(self.device)  # the bucket is filled again next

    def _invite(self, receivers: dict[str, int]) -> None:
        """A group of other members, made when they have been told of it."""
        self._group, self._ranks = None, dict(receivers)
        first, ranks = 1, {}
        for name, workers in receivers.items():
            ranks[name] = first
            first += workers
        store = self.directory / f"group-{uuid.uuid4().hex}"
        self._info = {"store": str(store), "world": first, "ranks": ranks, "timeout_s": self.timeout_s}
