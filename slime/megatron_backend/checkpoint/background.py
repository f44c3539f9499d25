"""Checkpoints that are written while the run goes on (--async-save): one thread per rank, with a group of its own.

    save: values -> host, files are planned    |  the next step trains
                                               |  the thread writes the files, then the checkpoint becomes the latest

Threads of all ranks talk over gloo on the host, because a group of the training may be in use at that time. Megatron's
own writer forks processes, which is not safe in a Ray actor with many threads.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta

import torch.distributed as dist


class BackgroundSaves:
    """Runs the second half of saves, in their order. `group`: for the collectives in it. Collective."""

    def __init__(self, timeout_minutes: int) -> None:
        self.group = dist.new_group(backend="gloo", timeout=timedelta(minutes=timeout_minutes))
        self._threads = ThreadPoolExecutor(max_workers=1, thread_name_prefix="async-save")
        self._running: list[Future[None]] = []

    def start(self, write: Callable[[], None]) -> None:
        """Run `write` after the calls before. If one of them fails, it is not run."""
        before = list(self._running)

        def run() -> None:
            for one in before:
                one.result()
            write()

        self._running.append(self._threads.submit(run))

    def wait(self) -> None:
        """Return when all calls have ended. Raises the first error."""
        running, self._running = self._running, []
        for one in running:
            one.result()

    def close(self) -> None:
        """Wait for the calls, and let go of their errors."""
        self._threads.shutdown(wait=True)
        self._running.clear()
