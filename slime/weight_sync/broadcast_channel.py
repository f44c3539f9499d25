"""The broadcast channel: each trainer rank sends its own slices to all workers of all engines at once, over a process
group of their own (slime.weight_sync.group). Nothing is gathered on the trainer's side; engines make whole tensors.

All trainer ranks use two buckets in turn: engines get the description of a bucket and receive it, one rank's region
after the other, while the ranks fill the other one. The group is used until other engines serve, or until an engine
dies and the group is given up; then the update begins again for the engines that are left. The first ranks of the group
are the trainer's; the workers of the engines follow in the pool's order.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from slime.protocols import WeightUpdate
from slime.weight_sync.channel import Export, Info, Part, TrainerPlace, WeightChannel, Worker
from slime.weight_sync.group import GivenUp, Group, GroupInfo, found, give_up, is_given_up
from slime.weight_sync.ranks import everywhere
from slime.weight_sync.slices import OfAllRanks
from slime.weight_sync.sources import Region, by_name, fill_own, sliced_buckets, whole_tensor
from slime.weight_sync.variables import ENGINE_VARIABLE

logger = logging.getLogger(__name__)


class BroadcastChannel(WeightChannel):
    """The trainer's side. `directory`, where the group's file is, must be seen by all hosts."""

    name = "nccl"

    def __init__(self, directory: Path, bucket_bytes: int, device: torch.device, timeout_s: float) -> None:
        self.directory, self.bucket_bytes, self.device = directory, bucket_bytes, device
        self.timeout_s = timeout_s
        self._group: Group | None = None
        self._info: GroupInfo | None = None
        self._ranks: dict[str, int] | None = None
        self._buckets: list[Tensor] = []
        self._of_update = OfAllRanks(
            lambda of_ranks: list(sliced_buckets(of_ranks, dist.get_rank(), self.bucket_bytes))
        )

    @classmethod
    def on_trainer(cls, place: TrainerPlace) -> BroadcastChannel:
        return cls(place.directory, place.bucket_bytes, place.device, place.timeout_s)

    @classmethod
    def on_engine(cls, worker: Worker) -> BroadcastReceiver:
        return BroadcastReceiver(worker)

    @staticmethod
    def give_up(info: Info) -> None:
        give_up(info["group"])

    @staticmethod
    def is_given_up(info: Info) -> bool:
        return is_given_up(info["group"])

    def parts(
        self, export: Export, version: int, *, compare: bool, receivers: dict[str, int]
    ) -> Iterator[WeightUpdate]:
        """Parts of `version`. The ranks send the bucket of a part when the next part is asked for.

        `receivers` has at least one engine. With `compare` all weights are sent a second time, and engines compare
        their live weights with them. After the group was given up, the parts continue without being sent until the
        driver asks for them again with other receivers.
        """
        slices = list(export.slices())
        buckets = self._of_update.get([each.place for each in slices])
        if not all(everywhere(self._ranks == receivers)):
            self._invite(receivers)
        turn, first = 0, dist.get_rank() == 0
        for loads_it in (True, False) if compare else (True,):
            for part in buckets:
                bucket = self._bucket(turn, part.nbytes)
                fill_own(bucket, part, slices)
                info = {"tensors": part.tensors, "regions": part.regions, "bytes": part.nbytes}
                info |= {"load": loads_it, "group": self._info}
                yield WeightUpdate(
                    *(version, self.name, info if first else {}), lasting=False, size_bytes=part.weights_bytes
                )
                self._send(bucket, part.regions)
                turn = 1 - turn
        self._settle(0)

    def _bucket(self, turn: int, size: int) -> Tensor:
        if not self._buckets or self._buckets[0].nbytes < size:
            self._settle(0)  # the old buckets may still be sent
            self._buckets = [
                torch.empty(max(size, self.bucket_bytes), dtype=torch.uint8, device=self.device)
                for _ in range(2)
            ]
        return self._buckets[turn][:size]

    def _send(self, bucket: Tensor, regions: list[Region]) -> None:
        """Begin to send and to receive, and wait until the other bucket may be filled."""
        if self._ranks is None or self._info is None:
            return
        try:
            if self._group is None:
                self._group = Group(self._info, dist.get_rank(), self.device)
            for source, start, size in regions:
                self._group.start(bucket[start : start + size], source)
        except GivenUp as error:
            self._give_up(error)
        self._settle(len(regions))

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
        """Describe a group of other members; it is made once they know of it. Collective."""
        if self._group is not None:
            self._group.close()
        self._group, self._ranks = None, dict(receivers)
        first, ranks = dist.get_world_size(), {}
        for name, workers in receivers.items():
            ranks[name] = first
            first += workers
        info = found(self.directory, ranks, first, self.timeout_s) if dist.get_rank() == 0 else None
        self._info = everywhere(info)[0]


class BroadcastReceiver:
    """The engine worker's side: {"tensors", "regions" (see slime.weight_sync.sources), "bytes", "group" (see
    `group.found`), "load"}."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._store: str | None = None
        self._group: Group | None = None

    @contextmanager
    def receive(self, info: Info) -> Iterator[Part | None]:
        """None when the group is given up: that is no fault of this engine, and the driver sends the weights again."""
        part = None
        try:
            bucket = self.take(info["bytes"], info["regions"], info["group"])
            tensors = by_name(info["tensors"])
            part = Part(
                {name: list(shape) for name, _, shape, _ in tensors.values()},
                lambda name: whole_tensor(bucket, tensors[name]),
                load=info["load"],
                compare=not info["load"],
                whole=False,
                series=info["group"]["store"],
                borrowed=False,
            )
        except GivenUp as error:
            logger.warning("weights are expected again: %s", error)
        yield part

    def take(self, size: int, regions: list[Region], group: GroupInfo) -> Tensor:
        """The next bucket, of `size` bytes, in memory of its own; waits for the trainer's ranks. Joins `group` if it is
        another group than before. GivenUp when that group is given up."""
        if group["store"] != self._store or self._group is None:
            name = self._worker.engine
            if name is None or name not in group["ranks"]:
                raise ValueError(f"{ENGINE_VARIABLE} must be one of {sorted(group['ranks'])}, got {name}")
            if self._group is not None:
                self._group.close()
            self._store, self._group = group["store"], None
            self._group = Group(group, group["ranks"][name] + self._worker.rank, self._worker.device)
        bucket = torch.empty(size, dtype=torch.uint8, device=self._worker.device)
        for source, start, length in regions:
            self._group.start(bucket[start : start + length], source)
        self._group.settle()
        return bucket
