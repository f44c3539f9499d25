"""The names of tensors in files that differ from those of a family's weight table.

Versions of transformers write a multimodal model under different prefixes. A family lists them (`Family.aliases`), and
the files are read as if they had the table's names.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from slime.models.slices import Stored, Tensors

Aliases = tuple[tuple[str, str], ...]
"""Pairs of prefixes: in some files, in the weight table. The first pair that fits a name counts."""


def rename(name: str, aliases: Aliases) -> str:
    """Returns the name of a tensor in the weight table."""
    for prefix, wanted in aliases:
        if name.startswith(prefix):
            return wanted + name.removeprefix(prefix)
    return name


def find_names(names: Iterable[str], aliases: Aliases) -> dict[str, str]:
    """Returns name in the weight table -> name in the files."""
    return {rename(name, aliases): name for name in names}


class RenamedTensors:
    """The tensors of a checkpoint under the names of the weight table."""

    def __init__(self, tensors: Tensors, aliases: Aliases) -> None:
        self._tensors, self._stored = tensors, find_names(tensors.names(), aliases)

    def names(self) -> set[str]:
        return set(self._stored)

    def get(self, name: str) -> Stored:
        return self._tensors.get(self._stored[name])

    def find_file(self, name: str) -> str:
        return self._tensors.find_file(self._stored[name])
