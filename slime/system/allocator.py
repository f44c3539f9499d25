"""Settings of PyTorch's memory allocator."""

from __future__ import annotations

from collections.abc import MutableMapping

VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def expand_segments(environ: MutableMapping[str, str]) -> None:
    """Sets the variable of `environ` that turns on expandable segments, unless the allocator has settings already.

    Other segments keep their size, so that gaps between tensors of different sizes stay. For 27 GiB of tensors, the
    allocator held 64 GiB without expandable segments, and 28 GiB with them (benchmarks/reports/allocator_h200.md).
    torch reads the variable when it first allocates.
    """
    if not any(name in environ for name in VARIABLES):
        environ[VARIABLES[0]] = "expandable_segments:True"
