"""Settings of PyTorch's memory allocator."""

from __future__ import annotations

from collections.abc import Collection, MutableMapping

VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def choose_settings(environ: MutableMapping[str, str], flag: Collection[str], *, expand: bool) -> None:
    """Chooses the variable of `VARIABLES` in `environ` that torch reads.

    If `flag`, the names of --train-env-vars, has only one of them, the other one is removed, because torch may prefer
    it. If no variable is set and `expand`, this turns on expandable segments. Other segments keep their size, so that
    gaps between tensors of different sizes stay (measured: benchmarks/reports/allocator_h200.md). torch reads the
    variable when it first allocates.
    """
    if names := [name for name in VARIABLES if name in flag]:
        for name in VARIABLES:
            if name not in names:
                environ.pop(name, None)
    elif expand and not any(name in environ for name in VARIABLES):
        environ[VARIABLES[0]] = "expandable_segments:True"
