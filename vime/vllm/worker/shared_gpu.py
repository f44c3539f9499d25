"""Lets an engine start and sleep on a GPU that it shares with a trainer, and perhaps with other jobs.

An engine measures the free memory when it starts, so the trainer must take its memory first. The server starts at the
same time as the trainer, does its imports and its configuration, and then waits until the trainer has its memory.

When the engine sleeps, another process may take memory at the same time. vLLM compares the free memory of the whole GPU
before and after and would raise an error. This module suppresses that error.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

LESS_IS_FREE = "Memory usage increased after sleeping."
"""Text of vLLM's AssertionError. The engine already sleeps when vLLM raises it; only a log line would follow."""
_POLL_S = 0.05


def wait_for(gate: str) -> None:
    """Returns when the file `gate` exists. The process that creates the file is this process's ancestor, whose death
    also ends this process."""
    if not Path(gate).exists():
        print(f"the engine waits for {gate} before it takes its device", flush=True)
    while not Path(gate).exists():
        time.sleep(_POLL_S)


@contextlib.contextmanager
def allow_other_memory_use() -> Iterator[None]:
    """Lets other processes on the GPU take more memory during a worker's `sleep` than the worker frees."""
    try:
        yield
    except AssertionError as error:
        if str(error) != LESS_IS_FREE:
            raise
        print("the engine sleeps; others on its GPU took more memory meanwhile than it gave", flush=True)
