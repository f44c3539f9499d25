"""Maps the buckets of a trainer on the same GPU into this process. The other end of slime.weight_sync.ipc_channel.

What comes over HTTP are handles as plain data: nothing is unpickled. A handle opens memory of a process of the same
user on this host, and nothing else.
"""

from __future__ import annotations

import base64
import json
from typing import Any

import torch
from torch import Tensor


class Buckets:
    """The buckets that were opened so far; a mapping stays for the next update, for it takes milliseconds to make."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._open: dict[str, Tensor] = {}

    def open(
        self, tensors: list[list[Any]] | None, handles: dict[str, list[Any]] | None
    ) -> dict[str, Tensor]:
        """The tensors of a bucket by HF name, as views of the trainer's memory: [name, dtype, shape, first byte] each.

        `handles`: what maps the bucket, by UUID of the GPU it is on. ValueError without one for this GPU, or when a
        tensor is not inside the bucket.
        """
        uuid = str(torch.cuda.get_device_properties(self._device).uuid)
        if not tensors or not handles or uuid not in handles:
            raise ValueError(
                f"a bucket must be on this engine's GPU {uuid}, got {sorted(handles or {})}; an engine that shares no "
                "GPU with the trainer needs --update-weight-transport disk"
            )
        bucket = self._map(handles[uuid])
        return {name: _view(bucket, name, dtype, shape, first) for name, dtype, shape, first in tensors}

    def _map(self, handle: list[Any]) -> Tensor:
        key = json.dumps(handle)
        if key not in self._open:
            decoded = [base64.b64decode(x) if isinstance(x, str) else x for x in handle]
            storage = torch.UntypedStorage._new_shared_cuda(self._device.index, *decoded)
            whole = torch.empty(0, dtype=torch.uint8, device=self._device)
            self._open[key] = whole.set_(storage)  # type: ignore[call-overload]
        return self._open[key]


def _view(bucket: Tensor, name: str, dtype: str, shape: list[int], first: int) -> Tensor:
    kind = getattr(torch, dtype)
    size = torch.Size(shape).numel() * kind.itemsize
    if first < 0 or first + size > bucket.nbytes:
        raise ValueError(
            f"{name} must lie inside its bucket, got bytes {first} to {first + size} of {bucket.nbytes}"
        )
    return bucket[first : first + size].view(kind).view(shape)
