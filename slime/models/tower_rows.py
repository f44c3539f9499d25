"""Parts of the weight tables of vision towers. Every tensor-parallel rank has the whole tower."""

from __future__ import annotations

from collections.abc import Iterable

from slime.models.layouts import Row
from slime.models.vision import PREFIX


def tower_rows(files: str, names: Iterable[str], *, prefix: str = PREFIX) -> tuple[Row, ...]:
    """Returns the rows of a tower whose tensors have the same names in the trainer and, after the prefix `files`, in
    files. Every tensor-parallel rank has the whole tower. "{b}" is the number of a block."""
    return tuple(Row(prefix + name, (files + name,)) for name in names)


def with_biases(*modules: str) -> tuple[str, ...]:
    """Returns the names of the weights and biases of `modules`."""
    return tuple(f"{module}.{part}" for module in modules for part in ("weight", "bias"))
