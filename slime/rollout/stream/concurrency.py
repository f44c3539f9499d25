"""This module limits the number of samples in generation: to a constant, or to a limit that adapts to the engines.

With `adapts_concurrency` the limit rises while samples wait for the limit. It falls when requests wait in the engines'
queues or are preempted there (additive increase, multiplicative decrease; Chiu and Jain,
10.1016/0169-7552(89)90019-6).
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from slime.protocols import GenerateResult

QUEUED = 0.1
"""The limit falls if requests spend this share of their time in the engines' queues, or if this share is preempted."""
FREE = 0.02
"""The limit rises if both shares are at most this value."""
FALL = 0.9
RISE = 1 / 16
"""The limit rises by this share of the first limit per window."""
LEAST = 1 / 16
"""The limit never falls below this share of the first limit."""


@dataclass
class Window:
    """Sums over finished requests. `full` is true if a request ended while a sample waited for the limit."""

    requests: int = 0
    seconds: float = 0.0
    queued_s: float = 0.0
    preempted: int = 0
    full: bool = False


def next_limit(limit: int, first: int, seen: Window) -> int:
    """Returns the limit after a window of requests. `first` is the limit at the start of the run."""
    queued = seen.queued_s / seen.seconds if seen.seconds > 0 else 0.0
    preempted = seen.preempted / max(seen.requests, 1)
    if max(queued, preempted) > QUEUED:
        return max(int(limit * FALL), int(first * LEAST), 1)
    if seen.full and queued <= FREE and not seen.preempted:
        return limit + max(int(first * RISE), 1)
    return limit


class Concurrency(asyncio.Semaphore):
    """A semaphore of `limit` samples. With `adapts`, `note` changes the limit after each window of requests.

    A lower limit takes effect as running samples end. It does not abort a running sample.
    """

    def __init__(self, limit: int, *, adapts: bool = False) -> None:
        super().__init__(limit)
        self.limit = self.first = limit
        self.adapts = adapts
        self.seen = Window()
        self._owed = 0

    def release(self) -> None:
        if self._owed:
            self._owed -= 1
        else:
            super().release()

    def note(self, seconds: float, result: GenerateResult) -> None:
        """Counts a finished request that took `seconds`. The limit does not change if the engines do not report queue
        times."""
        if not self.adapts or result.queue_s is None:
            return
        self.seen.requests += 1
        self.seen.seconds += seconds
        self.seen.queued_s += result.queue_s
        self.seen.preempted += result.preemptions > 0
        self.seen.full |= self.locked()
        if self.seen.requests >= self.limit:
            self.resize(next_limit(self.limit, self.first, self.seen))
            self.seen = Window()

    def scale(self, first: int) -> None:
        """Scales the limit after the number of engines has changed. `first` is the new engines' limit at a start."""
        self.resize(max(self.limit * first // self.first, 1))
        self.first = first

    def resize(self, limit: int) -> None:
        """Sets the number of concurrent samples to `limit`."""
        self._owed += max(0, self.limit - limit)
        for _ in range(limit - self.limit):
            self.release()
        self.limit = limit
