"""Names of the files of --recover-from memory. Reads file names only, and imports neither torch nor Megatron.

    FOLDER/policy/rank_00001.slot0                    the bytes of rank 1's state
    FOLDER/policy/rank_00001.slot0.iter_0000012       the record of a complete slot: its other values, and its iteration

A rank has two slots. A save removes the record of the older slot, writes the bytes, and then writes the new record, so
the newest record is always that of a complete state.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

SLOTS = 2
_RECORD = re.compile(r"rank_(\d+)\.slot(\d)\.iter_(\d+)")


@dataclass(frozen=True, order=True)
class StoredState:
    """A complete state of a rank."""

    iteration: int
    rank: int
    slot: int

    def record_path(self, folder: Path) -> Path:
        return folder / f"{slot_path(folder, self.rank, self.slot).name}.iter_{self.iteration:07d}"


def slot_path(folder: Path, rank: int, slot: int) -> Path:
    return folder / f"rank_{rank:05d}.slot{slot}"


def find_states(folder: Path) -> list[StoredState]:
    """Returns the complete states in the folder of a role."""
    found = (_RECORD.fullmatch(path.name) for path in folder.glob("rank_*.iter_*"))
    return sorted(StoredState(int(name[3]), int(name[1]), int(name[2])) for name in found if name)


def find_common(states: Collection[StoredState], ranks: int) -> set[int]:
    """Returns the iterations that each of `ranks` ranks has."""
    of_ranks = [{one.iteration for one in states if one.rank == rank} for rank in range(ranks)]
    return set.intersection(*of_ranks)
