"""Host memory that a GPU copies to and from at full speed. It is allocated once, pinned, and unpinned at the end."""

from __future__ import annotations

import torch
from torch import Tensor


def pinned(size: int, device: torch.device, what: str) -> Tensor:
    """Returns `size` bytes of zeros, pinned for copies to and from `device` if it is a GPU.

    Raises RuntimeError with `what` if CUDA cannot pin the bytes. `pin_memory()` is not used, because torch rounds its
    pinned blocks up to a power of two.
    """
    host = torch.empty(size, dtype=torch.uint8)
    if device.type == "cuda" and size:
        host.fill_(0)  # many threads allocate pages here; the call below would use one thread
        code = int(torch.cuda.cudart().cudaHostRegister(host.data_ptr(), size, 0))
        if code != 0:
            raise RuntimeError(
                f"host memory must be pinned for offloading, got CUDA error {code} for {size} bytes of {what}; offload "
                "less (--no-offload-train, --offload-train-parts, --optimizer-offload-fraction)"
            )
    return host


def unpin(host: Tensor, device: torch.device) -> None:
    """Reverses `pinned`. The bytes stay until the last reference is gone."""
    if device.type == "cuda" and host.numel():
        torch.cuda.cudart().cudaHostUnregister(host.data_ptr())
