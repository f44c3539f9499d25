"""The broadcast channel: trainer rank 0 sends packed weights to all workers of all engines at once, over a process
group of their own (slime.weight_sync.group).

Bucket by bucket, of two in turns: engines are told what is in one and take it while the trainer sends it and fills the
other. The group lives until the engines that serve are others, or until it is given up because one died; what was being
sent is then made again for those that are left. Ranks of it: 0 the trainer, then the workers of the engines, in the
pool's order.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from slime.protocols import WeightUpdate
from slime.weight_sync.buckets import Export, fill, grouped, room_for
from slime.weight_sync.group import GivenUp, Group, found

logger = logging.getLogger(__name__)


class BroadcastChannel:
    """`directory`: where the group's file is put, seen by all hosts. `bucket_bytes` bounds a bucket, or the largest
    tensor does. `timeout_s`: how long the trainer waits for an engine that lives and does not take its bucket.
    """

    def __init__(self, directory: Path, bucket_bytes: int, device: torch.device, timeout_s: float) -> None:
        self.directory, self.bucket_bytes, self.device = directory, bucket_bytes, device
        self.timeout_s = timeout_s
        self._group: Group | None = None
        self._info: dict[str, Any] = {}
        self._ranks: dict[str, int] | None = None
        self._buckets: list[Tensor] = []

    def parts(
        self, export: Export, version: int, *, compare: bool, receivers: dict[str, int]
    ) -> Iterator[WeightUpdate]:
        """Parts of `version`; what a part tells of is sent when the next one is asked for.

        `receivers`: workers of each serving engine, by its name; at least one. Collective over all trainer ranks, of
        which rank 0 sends. With `compare` all weights are sent a second time, for engines to compare. When the group is
        given up, the parts go on without being sent, as the other ranks know nothing of it, until the driver asks for
        them anew with other receivers.
        """
        sends = dist.get_rank() == 0
        if sends and self._ranks != receivers:
            self._invite(receivers)
        turn = 0
        for load in (True, False) if compare else (True,):
            for tensors in grouped(export(), self.bucket_bytes):
                if not sends:
                    yield WeightUpdate(version, {}, lasting=False)
                    continue
                bucket = self._bucket(turn, room_for(tensors))
                info = {"tensors": fill(bucket, tensors), "bytes": bucket.nbytes, "load": load}
                yield WeightUpdate(version, info | {"group": self._info}, lasting=False)
                self._send(bucket)
                turn = 1 - turn
        self._settle(0)

    def _bucket(self, turn: int, size: int) -> Tensor:
        if not self._buckets or self._buckets[0].nbytes < size:
            self._settle(0)  # the old ones may be on their way
            self._buckets = [
                torch.empty(max(size, self.bucket_bytes), dtype=torch.uint8, device=self.device)
                for _ in range(2)
            ]
        return self._buckets[turn][:size]

    def _send(self, bucket: Tensor) -> None:
        """Begin to, and wait until the other bucket may be filled."""
        if self._ranks is None:
            return
        try:
            if self._group is None:
                self._group = Group(self._info, 0, self.device)
            self._group.start(bucket)
        except GivenUp as error:
            self._give_up(error)
        self._settle(1)

    def _settle(self, limit: int) -> None:
        try:
            if self._group is not None:
                self._group.settle(limit)
        except GivenUp as error:
            self._give_up(error)

    def _give_up(self, error: GivenUp) -> None:
        logger.warning("weights have to be sent again: %s", error)
        self._group = self._ranks = None

    def _invite(self, receivers: dict[str, int]) -> None:
        """A group of other members, made when they have been told of it."""
        if self._group is not None:
            self._group.close()
        self._group, self._ranks = None, dict(receivers)
        first, ranks = 1, {}
        for name, workers in receivers.items():
            ranks[name] = first
            first += workers
        self._info = found(self.directory, ranks, first, self.timeout_s)
