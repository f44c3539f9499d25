"""Processes for the ranks of a trainer without Ray. Imports no Megatron, so that only the ranks load it."""

from __future__ import annotations

import sys

import torch
from torch import multiprocessing

from slime.hooks import Hook


def run_ranks(work: Hook, ranks: int, values: tuple[object, ...]) -> None:
    """Calls `work(rank, *values)` in `ranks` new processes, and waits for them. Raises RuntimeError if one fails."""
    try:
        multiprocessing.start_processes(
            _enter, args=(list(sys.path), work, values), nprocs=ranks, start_method="spawn"
        )
    except multiprocessing.ProcessRaisedException as error:
        raise RuntimeError(f"a rank of the trainer failed: {error}") from None


def _enter(rank: int, path: list[str], work: Hook, values: tuple[object, ...]) -> None:
    sys.path[:] = path
    torch.set_num_threads(1)
    work(rank, *values)
