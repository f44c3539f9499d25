"""The channel vllm-nccl: vLLM's own packed broadcast over NCCL, as a value of --update-weight-transport.

vLLM's weight-transfer engines "nccl" send all weights from trainer rank 0. This channel uses their process group and
their packing (vllm.distributed.weight_transfer), which both versions of vLLM have. The driver, the names, the loading
and the checks are those of every channel. vLLM's group cannot leave an engine that dies: the run then ends with an
error. The channel nccl has no such limit, and each of its ranks sends its own slices.

Not used: vLLM's engines sharded_rdt and nccl_m2n. They need Ray's tensor transport or the layout of every parameter on
both sides, and load without the checks of an update.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from slime.protocols import WeightUpdate
from slime.weight_sync.buckets import grouped
from slime.weight_sync.channel import Export, Info, Named, Part, TrainerSettings, WeightChannel, Worker
from slime.weight_sync.group import GroupInfo, found, give_up, is_abandoned
from slime.weight_sync.ranks import everywhere, is_first
from slime.weight_sync.variables import ENGINE_VARIABLE

if TYPE_CHECKING:
    from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator

_COMMON = "vllm.distributed.weight_transfer.nccl_common"
_PACKED = "vllm.distributed.weight_transfer.packed_tensor"
_LOOK_S = 0.05
_BUFFERS = 2


class PackedNcclChannel(WeightChannel):
    """The trainer's side. All ranks gather the weights, and rank 0 sends them."""

    name = "vllm-nccl"

    def __init__(self, directory: Path, bucket_bytes: int, device: torch.device, timeout_s: float) -> None:
        self.directory, self.bucket_bytes, self.device = directory, bucket_bytes, device
        self.timeout_s = timeout_s
        self._receivers: dict[str, int] | None = None
        self._group: PyNcclCommunicator | None = None
        self._info: dict[str, object] = {}

    @classmethod
    def on_trainer(cls, settings: TrainerSettings) -> PackedNcclChannel:
        if settings.device.type != "cuda":
            raise ValueError(
                f"--update-weight-transport {cls.name} must run on GPUs, got {settings.device.type}; use nccl, which "
                "has gloo on CPUs"
            )
        return cls(settings.directory, settings.bucket_bytes, settings.device, settings.timeout_s)

    @classmethod
    def on_engine(cls, worker: Worker) -> PackedNcclReceiver:
        return PackedNcclReceiver(worker)

    @staticmethod
    def give_up(info: Info) -> None:
        give_up(info["group"])

    @staticmethod
    def is_abandoned(info: Info) -> bool:
        return is_abandoned(info["group"])

    def parts(
        self, export: Export, version: int, *, compare: bool, receivers: dict[str, int]
    ) -> Iterator[WeightUpdate]:
        """Yields the parts of `version`. Rank 0 sends a part when the next part is requested."""
        if self._receivers != receivers:
            self._invite(receivers)
        for load in (True, False) if compare else (True,):
            for tensors in grouped(export.gathered(), self.bucket_bytes):
                entries = [
                    (name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape))
                    for name, tensor in tensors
                ]
                info = {**self._info, "tensors": entries, "load": load}
                size = sum(tensor.nbytes for _, tensor in tensors)
                yield WeightUpdate(
                    *(version, self.name, info if is_first() else {}), lasting=False, size_bytes=size
                )
                if is_first():
                    self._send(tensors)

    def _invite(self, receivers: dict[str, int]) -> None:
        """Describes a group of rank 0 and all workers. Collective."""
        self._group, self._receivers = None, dict(receivers)
        ranks, world = {}, 1
        for name, workers in receivers.items():
            ranks[name] = world
            world += workers
        info: dict[str, object] = {}
        if is_first():
            with socket.socket() as free:
                free.bind(("", 0))
                port = free.getsockname()[1]
            group = found(self.directory, ranks, world, self.timeout_s)
            info = {"group": group, "host": _address(), "port": port, "bucket_bytes": self.bucket_bytes}
        self._info = everywhere(info)[0]

    def _send(self, tensors: list[Named]) -> None:
        """Sends in a thread, because nothing ends a broadcast to a dead engine. A broadcast that fits into
        NCCL's buffers ends without its receivers, so the group's mark is also read before a broadcast."""
        errors: list[BaseException] = []
        group: GroupInfo = self._info["group"]  # type: ignore[assignment]
        if is_abandoned(group):
            raise self._lost()

        def send() -> None:
            try:
                torch.cuda.set_device(self.device)
                self._broadcast(tensors)
            except BaseException as error:  # the border of this thread: the caller raises it
                errors.append(error)

        thread = threading.Thread(target=send, daemon=True)
        thread.start()
        end = time.monotonic() + self.timeout_s
        while thread.is_alive():
            thread.join(_LOOK_S)
            if thread.is_alive() and (is_abandoned(group) or time.monotonic() > end):
                raise self._lost()
        if errors:
            give_up(group)
            raise errors[0]

    def _lost(self) -> RuntimeError:
        return RuntimeError(
            f"a broadcast of --update-weight-transport {self.name} must reach all engines, got one that is lost; "
            "resume the run, or use nccl, which goes on without a lost engine"
        )

    def _broadcast(self, tensors: list[Named]) -> None:
        if self._group is None:
            world = len(self._receivers or {}) and 1 + sum((self._receivers or {}).values())
            self._group = join(str(self._info["host"]), int(str(self._info["port"])), 0, world, self.device)
        import_module(_PACKED).packed_nccl_broadcast_producer(
            iterator=iter(tensors),
            group=self._group,
            src=0,
            post_iter_func=lambda named: named[1],
            buffer_size_bytes=self.bucket_bytes,
            num_buffers=_BUFFERS,
        )
        torch.cuda.synchronize(self.device)  # The producer returns before the engines have the weights.


class PackedNcclReceiver:
    """The engine worker's side. Its message is {"tensors", "group", "host", "port", "bucket_bytes", "load"}."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._store: str | None = None
        self._group: PyNcclCommunicator | None = None

    @contextmanager
    def receive(self, info: Info) -> Iterator[Part | None]:
        """Opens a part when all its tensors have arrived, in new memory."""
        if info["group"]["store"] != self._store or self._group is None:
            name, ranks = self._worker.engine, info["group"]["ranks"]
            if name is None or name not in ranks:
                raise ValueError(f"{ENGINE_VARIABLE} must be one of {sorted(ranks)}, got {name}")
            rank = ranks[name] + self._worker.rank
            self._group = join(info["host"], info["port"], rank, info["group"]["world"], self._worker.device)
            self._store = info["group"]["store"]
        shapes = {name: list(shape) for name, _, shape in info["tensors"]}
        tensors: list[Named] = []
        import_module(_PACKED).packed_nccl_broadcast_consumer(
            iterator=((name, (shape, getattr(torch, dtype))) for name, dtype, shape in info["tensors"]),
            group=self._group,
            src=0,
            post_unpack_func=tensors.extend,
            buffer_size_bytes=info["bucket_bytes"],
            num_buffers=_BUFFERS,
            device=self._worker.device,
        )
        torch.cuda.synchronize(self._worker.device)
        yield Part(
            shapes,
            dict(tensors).__getitem__,
            load=info["load"],
            compare=not info["load"],
            whole=False,
            series=self._store,
            borrowed=False,
        )


def join(host: str, port: int, rank: int, world: int, device: torch.device) -> PyNcclCommunicator:
    """Joins vLLM's group for weights. Returns when all members have joined."""
    group: PyNcclCommunicator = import_module(_COMMON).stateless_init_process_group(
        host, port, rank, world, device
    )
    return group


def _address() -> str:
    """Returns the address of this node that other nodes reach."""
    return str(import_module("vllm.utils.network_utils").get_ip())
