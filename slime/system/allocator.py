"""Settings of PyTorch's memory allocator."""

from __future__ import annotations

from collections.abc import Collection, MutableMapping

VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def choose_settings(environ: MutableMapping[str, str], flag: Collection[str], *, expand: bool) -> None:
    """Leaves one of `VARIABLES` in `environ`, because torch reads the other one first if both are set.

    A variable in `flag`, the names of --train-env-vars, replaces an inherited one. If there is none and `expand`, this
    turns on expandable segments. Other segments keep their size, so that gaps between tensors of different sizes stay
    (measured: benchmarks/reports/allocator_h200.md). torch reads the variable when it first allocates.
    """
    if names := [name for name in VARIABLES if name in flag]:
        for name in VARIABLES:
            if name not in names:
                environ.pop(name, None)
    elif expand and not any(name in environ for name in VARIABLES):
        environ[VARIABLES[0]] = "expandable_segments:True"
