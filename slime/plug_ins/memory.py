"""The memory of this process's GPU, for hooks of the training. slime's memory_utils has these names."""

from __future__ import annotations

import gc
import logging

import torch

logger = logging.getLogger(__name__)
_GIB = 1 << 30


def available_memory() -> dict[str, float]:
    """Returns the GPU's `total_GB`, `free_GB`, `used_GB`, and this process's `allocated_GB` and `reserved_GB`, in GiB.
    Returns {} without a GPU."""
    if not torch.cuda.is_available():
        return {}
    free, total = torch.cuda.mem_get_info()
    figures = {
        "total_GB": total,
        "free_GB": free,
        "used_GB": total - free,
        "allocated_GB": torch.cuda.memory_allocated(),
        "reserved_GB": torch.cuda.memory_reserved(),
    }
    return {name: round(value / _GIB, 2) for name, value in figures.items()}


def clear_memory(clear_host_memory: bool = False) -> None:
    """Collects garbage, and returns the GPU memory that no tensor uses. `clear_host_memory` also returns pinned host
    memory, if this version of torch can."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    if clear_host_memory and hasattr(torch._C, "_host_emptyCache"):
        torch._C._host_emptyCache()


def print_memory(msg: str, clear_before_print: bool = False) -> dict[str, float]:
    """Logs and returns the figures of `available_memory`."""
    if clear_before_print:
        clear_memory()
    figures = available_memory()
    logger.info("%s: %s", msg, figures or "no GPU")
    return figures
