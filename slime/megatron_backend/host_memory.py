"""Host memory that a GPU copies to and from at full speed. It is allocated once, pinned, and unpinned at the end."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from slime.config import Config


def host_threads(config: Config) -> int:
    """Returns the number of cores per trainer rank on a host. Ray sets the number of threads of an actor with a GPU to
    1."""
    ranks = config.cluster.actor_num_gpus_per_node
    return max(min(len(os.sched_getaffinity(0)), (os.cpu_count() or 1) // ranks), 1)


@contextmanager
def computing(threads: int) -> Iterator[None]:
    """Lets torch compute with `threads` threads on the host. Ray starts its processes with one thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def pinned(size: int, device: torch.device, what: str, threads: int) -> Tensor:
    """Returns `size` bytes of zeros, pinned for copies to and from `device` if it is a GPU.

    The system zeroes memory when it is first written, about 2 GB/s per thread. `threads` write it. Engines that share
    the GPU start only after the trainer's state has left it.

    Raises RuntimeError with `what` if CUDA cannot pin the bytes. `pin_memory()` is not used, because torch rounds its
    pinned blocks up to a power of two.
    """
    host = torch.empty(size, dtype=torch.uint8)
    if device.type == "cuda" and size:
        with computing(threads):
            host.fill_(0)  # the call below would use one thread
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
