"""The IPC channel: engines on the trainer's own GPUs read its memory, so the trainer sends only addresses.

Weights are packed alternately into two buckets of device memory: while engines load one bucket, the trainer fills the
other. Engines get plain data about a bucket: names, shapes, offsets, and per GPU the handles by which CUDA maps another
process's memory (cudaIpcMemHandle). A handle opens only memory of a process of the same user on this host.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from slime.protocols import WeightUpdate
from slime.weight_sync.buckets import compute_bucket_bytes, fill, grouped, views
from slime.weight_sync.channel import Export, Info, Part, TrainerSettings, WeightChannel, Worker

_EXPANDABLE = re.compile(r"expandable_segments\s*:\s*True")
Handle = list[str | int | bool | None]
"""The values that torch needs to map a bucket into another process, as JSON types."""


class IpcChannel(WeightChannel):
    """The trainer's side of the IPC channel. Each trainer rank packs all weights into buckets on its own GPU, and the
    engine worker on the same GPU reads them.

    The ranks run in lockstep. A tensor that is larger than the buckets makes the channel allocate new buckets. torch
    frees the old buckets' memory when no engine maps it any more.
    """

    name = "ipc"

    def __init__(self, bucket_bytes: int, device: torch.device) -> None:
        self.bucket_bytes, self.device = bucket_bytes, device
        self._buckets: list[Tensor] = []
        self._handles: list[dict[str, Handle]] = []

    @classmethod
    def on_trainer(cls, settings: TrainerSettings) -> IpcChannel:
        return cls(settings.bucket_bytes, settings.device)

    @classmethod
    def on_engine(cls, worker: Worker) -> IpcReceiver:
        return IpcReceiver(worker)

    def parts(
        self, export: Export, version: int, *, compare: bool, receivers: dict[str, int]
    ) -> Iterator[WeightUpdate]:
        """Yields the parts of `version`. The memory of a part is ready when the part is yielded.

        With `compare` all weights are sent a second time, and engines compare their live weights with them.
        """
        turn = 0
        for load in (True, False) if compare else (True,):
            for tensors in grouped(export.gathered(), self.bucket_bytes):
                size = compute_bucket_bytes(tensors)
                if not self._buckets or self._buckets[0].nbytes < size:
                    self._allocate(max(size, self.bucket_bytes))
                entries = fill(self._buckets[turn], tensors)
                torch.cuda.synchronize(self.device)
                info = {"tensors": entries, "handles": self._handles[turn], "load": load}
                whole = sum(tensor.nbytes for _, tensor in tensors)
                yield WeightUpdate(version, self.name, info, lasting=False, size_bytes=whole)
                turn = 1 - turn

    def _allocate(self, size: int) -> None:
        """Allocates two buckets, and collects all ranks' handles by the UUID of their GPUs."""
        with plain_segments():
            self._buckets = [torch.empty(size, dtype=torch.uint8, device=self.device) for _ in range(2)]
        uuid = str(torch.cuda.get_device_properties(self.device).uuid)
        mine = [_handle(bucket) for bucket in self._buckets]
        of_ranks: list[tuple[str, list[Handle]]] = [("", [])] * dist.get_world_size()
        dist.all_gather_object(of_ranks, (uuid, mine))
        self._handles = [{gpu: handles[i] for gpu, handles in of_ranks} for i in range(2)]


@contextmanager
def plain_segments() -> Iterator[None]:
    """Allocates memory outside of expandable segments, if the settings of PyTorch's allocator turn them on.

    Another process maps an expandable segment by a system call (pidfd_getfd) that containers usually forbid.
    """
    settings = _read_settings()
    if not _EXPANDABLE.search(settings):
        yield
        return
    torch._C._accelerator_setAllocatorSettings(_EXPANDABLE.sub("expandable_segments:False", settings))
    try:
        yield
    finally:
        torch._C._accelerator_setAllocatorSettings(settings)


def _read_settings() -> str:
    """Returns the settings of PyTorch's allocator, from variables of the environment or from a later call."""
    if read := getattr(torch._C, "_accelerator_getAllocatorSettings", None):  # torch 2.11 may lack it
        return str(read())
    return str(torch.cuda.memory._snapshot()["allocator_settings"]["PYTORCH_CUDA_ALLOC_CONF"])


def _handle(bucket: Tensor) -> Handle:
    """Returns the tuple that torch's own sharing between processes pickles, without the device index, which differs
    between processes: memory handle, size, offset, counter of users (handle, offset), event (handle, whether to
    wait)."""
    _, *rest = bucket.untyped_storage()._share_cuda_()
    return [base64.b64encode(x).decode() if isinstance(x, bytes) else x for x in rest]


class IpcReceiver:
    """The engine worker's side. Its message is {"tensors", "handles" by UUID of the GPU, "load"}.

    A bucket stays mapped for the next update, because mapping takes milliseconds.
    """

    def __init__(self, worker: Worker) -> None:
        self._device = worker.device
        self._open: dict[str, Tensor] = {}

    @contextmanager
    def receive(self, info: Info) -> Iterator[Part]:
        """Opens a part. Raises ValueError without a bucket on this worker's GPU."""
        tensors = views(self.take(info["handles"]), info["tensors"])
        yield Part(
            {name: list(tensor.shape) for name, tensor in tensors.items()},
            # An engine may keep loaded tensors until a layer is complete; the trainer may fill its bucket again before
            # that.
            lambda name: tensors[name].clone(),
            load=info["load"],
            compare=not info["load"],
            whole=False,
            view=tensors.__getitem__,
        )

    def take(self, handles: dict[str, Handle]) -> Tensor:
        """Returns the bucket behind the handle for this worker's GPU. Raises ValueError if no handle belongs to this
        GPU."""
        uuid = str(torch.cuda.get_device_properties(self._device).uuid)
        if uuid not in handles:
            raise ValueError(
                f"a bucket must be on this engine's GPU {uuid}, got {sorted(handles)}; an engine that shares no GPU "
                "with the trainer needs --update-weight-transport disk or nccl"
            )
        key = json.dumps(handles[uuid])
        if key not in self._open:
            decoded = [base64.b64decode(x) if isinstance(x, str) else x for x in handles[uuid]]
            storage = torch.UntypedStorage._new_shared_cuda(self._device.index, *decoded)
            whole = torch.empty(0, dtype=torch.uint8, device=self._device)
            self._open[key] = whole.set_(storage)
        return self._open[key]
