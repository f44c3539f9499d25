"""Checkpoints that are written while the run continues (--async-save): one thread per rank, with a separate group.

    save: values -> host, files are planned    |  the next step trains
                                               |  the thread writes the files, then the checkpoint becomes the latest

The ranks' threads communicate over gloo on the host, because a group of the training may be in use at that time.
Megatron's own writer forks processes, which is not safe in a Ray actor with many threads.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta

import torch.distributed as dist


class BackgroundSaves:
    """Runs the second half of saves, in their order. `group` is for the collectives in that half. The constructor is
    collective."""

    def __init__(self, timeout_minutes: float) -> None:
        self.group = dist.new_group(backend="gloo", timeout=timedelta(minutes=timeout_minutes))
        self._threads = ThreadPoolExecutor(max_workers=1, thread_name_prefix="async-save")
        self._running: list[Future[None]] = []

    def start(self, write: Callable[[], None]) -> None:
        """Runs `write` after the earlier calls. If an earlier call fails, `write` does not run."""
        before = list(self._running)

        def run() -> None:
            for one in before:
                one.result()
            write()

        self._running.append(self._threads.submit(run))

    def wait(self) -> None:
        """Returns when all calls have ended. Raises the first error."""
        running, self._running = self._running, []
        for one in running:
            one.result()

    def close(self) -> None:
        """Waits for the calls, and drops their errors."""
        self._threads.shutdown(wait=True)
        self._running.clear()
