"""Where an engine's worker finds the buckets of an update: in the memory of a trainer on the same GPU, or sent to it.

The other end of slime.weight_sync. What comes over HTTP is plain data, nothing is unpickled; a handle opens memory of a
process of the same user on this host and nothing else.
"""

from __future__ import annotations

import base64
import json
import os
from typing import Any

import torch
from torch import Tensor

from slime.weight_sync.group import Group
from vime.engine.plugin import ENGINE_VARIABLE


class SharedBuckets:
    """The trainer's buckets that were mapped so far; a mapping stays for the next update, for it takes milliseconds."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._open: dict[str, Tensor] = {}

    def take(self, handles: dict[str, list[Any]]) -> Tensor:
        """The bucket behind `handles`, which are by UUID of the GPU it is on. ValueError without one for this GPU."""
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
            self._open[key] = whole.set_(storage)  # type: ignore[call-overload]
        return self._open[key]


class SentBuckets:
    """Buckets that trainer rank 0 broadcasts. `worker`: which of its engine's workers this is."""

    def __init__(self, device: torch.device, worker: int) -> None:
        self._device, self._worker = device, worker
        self._store: str | None = None
        self._group: Group | None = None

    def take(self, size: int, group: dict[str, Any]) -> Tensor:
        """The next bucket, of `size` bytes, in memory of its own: waits for the trainer. Joins the group of `group` if
        it is another; GivenUp when that is given up."""
        if group["store"] != self._store or self._group is None:
            name = os.environ.get(ENGINE_VARIABLE)
            if name not in group["ranks"]:
                raise ValueError(f"{ENGINE_VARIABLE} must be one of {sorted(group['ranks'])}, got {name}")
            if self._group is not None:
                self._group.close()
            self._store, self._group = group["store"], None
            self._group = Group(group, group["ranks"][name] + self._worker, self._device)
        bucket = torch.empty(size, dtype=torch.uint8, device=self._device)
        self._group.start(bucket)
        self._group.settle()
        return bucket


def views(bucket: Tensor, tensors: list[list[Any]]) -> dict[str, Tensor]:
    """The tensors of a bucket by HF name, [name, dtype, shape, first byte] each. ValueError for one that sticks out."""
    return {name: _view(bucket, name, dtype, shape, first) for name, dtype, shape, first in tensors}


def _view(bucket: Tensor, name: str, dtype: str, shape: list[int], first: int) -> Tensor:
    kind = getattr(torch, dtype)
    size = torch.Size(shape).numel() * kind.itemsize
    if first < 0 or first + size > bucket.nbytes:
        raise ValueError(
            f"{name} must lie inside its bucket, got bytes {first} to {first + size} of {bucket.nbytes}"
        )
    return bucket[first : first + size].view(kind).view(shape)
