"""Processes for the ranks of a test, forked from a server that imported the trainer once: 5 s less per process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import multiprocessing


def on_ranks(work: Callable[..., None], *args: Any, ranks: int) -> None:
    """Call `work(rank, *args)` in `ranks` processes and wait for them.

    The environment of the processes is that of the first call in this test process: use it in tests/slime alone.
    """
    multiprocessing.set_forkserver_preload(["slime.megatron_backend.step.trainer"])
    multiprocessing.start_processes(work, args=args, nprocs=ranks, start_method="forkserver")
