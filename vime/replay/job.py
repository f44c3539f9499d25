"""The order of a replay to its ranks, and the files that they write."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from slime.config import Config

COLUMNS = "columns/{rollout_id}_{rank}.pt"
VALUES = "values-{rank}.pt"
FAILURE = "failure.txt"
"""File with the error of the first rank that failed."""


@dataclass(frozen=True)
class ReplayJob:
    """The work of each rank: the rollouts, with the path templates of their samples. `keep` has the names of the
    tensors whose values after the last rollout are saved in `folder`."""

    config: Config
    samples: dict[int, str]
    folder: Path
    threads: int
    keep: tuple[str, ...] = ()
