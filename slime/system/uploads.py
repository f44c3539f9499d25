"""Copies of small tensors from the host to a device, for which the host does not wait.

A copy from pageable memory waits until the device has finished all queued work. One such copy per micro-batch would
leave the device without work at the start of each forward.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor


def upload(tensor: Tensor, device: torch.device | str) -> Tensor:
    """Returns the tensor on `device`. A host tensor goes to a GPU through pinned memory, which torch keeps until the
    copy has ended."""
    if tensor.device.type != "cpu" or not str(device).startswith("cuda"):
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
