"""The broadcast channel: each trainer rank sends its own slices to all engines' workers at once, over a dedicated
process group (slime.weight_sync.group). The trainer gathers nothing. The engines assemble whole tensors.

All trainer ranks alternate between two buckets. Engines get the description of a bucket and receive it, one rank's
region after the other, while the ranks fill the other bucket. The group is used until the set of serving engines
changes, or until an engine dies and the group is given up. Then the update begins again for the remaining engines. The
first ranks of the group belong to the trainer; the workers of the engines follow in the pool's order.
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
from slime.weight_sync.channel import Export, Info, Part, TrainerSettings, WeightChannel, Worker
from slime.weight_sync.group import GroupAbandoned, GroupInfo, TransferGroup, found, give_up, is_abandoned
from slime.weight_sync.ranks import everywhere
from slime.weight_sync.slices import OfAllRanks
from slime.weight_sync.sources import Region, by_name, fill_own, sliced_buckets, whole_tensor
from slime.weight_sync.variables import ENGINE_VARIABLE

logger = logging.getLogger(__name__)


class BroadcastChannel(WeightChannel):
    """The trainer's side of the broadcast channel. All hosts must see `directory`, which holds the group's file."""

    name = "nccl"

    def __init__(self, directory: Path, bucket_bytes: int, device: torch.device, timeout_s: float) -> None:
        self.directory, self.bucket_bytes, self.device = directory, bucket_bytes, device
        self.timeout_s = timeout_s
        self._group: TransferGroup | None = None
        self._info: GroupInfo | None = None
        self._ranks: dict[str, int] | None = None
        self._buckets: list[Tensor] = []
        self._of_update = OfAllRanks(
            lambda of_ranks: list(sliced_buckets(of_ranks, dist.get_rank(), self.bucket_bytes))
        )

    @classmethod
    def on_trainer(cls, settings: TrainerSettings) -> BroadcastChannel:
        return cls(settings.directory, settings.bucket_bytes, settings.device, settings.timeout_s)

    @classmethod
    def on_engine(cls, worker: Worker) -> BroadcastReceiver:
        return BroadcastReceiver(worker)

    @staticmethod
    def give_up(info: Info) -> None:
        give_up(info["group"])

    @staticmethod
    def is_abandoned(info: Info) -> bool:
        return is_abandoned(info["group"])

    def parts(
        self, export: Export, version: int, *, compare: bool, receivers: dict[str, int]
    ) -> Iterator[WeightUpdate]:
        """Yields the parts of `version`. The ranks send the bucket of a part when the next part is requested.

        `receivers` has at least one engine. With `compare` all weights are sent a second time, and engines compare
        their live weights with them. After the group was given up, the parts continue without being sent until the
        driver requests them again with other receivers.
        """
        slices = list(export.slices())
        buckets = self._of_update.get([each.position for each in slices])
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
        """Starts to send and to receive, and waits until the other bucket may be filled."""
        if self._ranks is None or self._info is None:
            return
        try:
            if self._group is None:
                self._group = TransferGroup(self._info, dist.get_rank(), self.device)
            for source, start, size in regions:
                self._group.start(bucket[start : start + size], source)
        except GroupAbandoned as error:
            self._give_up(error)
        self._settle(len(regions))

    def _settle(self, limit: int) -> None:
        try:
            if self._group is not None:
                self._group.settle(limit)
        except GroupAbandoned as error:
            self._give_up(error)

    def _give_up(self, error: GroupAbandoned) -> None:
        logger.warning("weights have to be sent again: %s", error)
        self._group = self._ranks = None

    def _invite(self, receivers: dict[str, int]) -> None:
        """Describes a group with other members. The group is created when all members have its description.
        Collective."""
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
    """The engine worker's side. Its message is {"tensors", "regions" (see slime.weight_sync.sources), "bytes", "group"
    (see `group.found`), "load"}."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._store: str | None = None
        self._group: TransferGroup | None = None

    @contextmanager
    def receive(self, info: Info) -> Iterator[Part | None]:
        """Opens a part. Yields None when the group is given up: that is not this engine's fault, and the driver sends
        the weights again."""
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
        except GroupAbandoned as error:
            logger.warning("weights are expected again: %s", error)
        yield part

    def take(self, size: int, regions: list[Region], group: GroupInfo) -> Tensor:
        """Returns the next bucket, of `size` bytes, in new memory, after the trainer's ranks have sent it. Joins
        `group` if it is not the current group. Raises GroupAbandoned when that group is given up."""
        if group["store"] != self._store or self._group is None:
            name = self._worker.engine
            if name is None or name not in group["ranks"]:
                raise ValueError(f"{ENGINE_VARIABLE} must be one of {sorted(group['ranks'])}, got {name}")
            if self._group is not None:
                self._group.close()
            self._store, self._group = group["store"], None
            self._group = TransferGroup(group, group["ranks"][name] + self._worker.rank, self._worker.device)
        bucket = torch.empty(size, dtype=torch.uint8, device=self._worker.device)
        for source, start, length in regions:
            self._group.start(bucket[start : start + length], source)
        self._group.settle()
        return bucket
