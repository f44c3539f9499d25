"""How many samples may be in generation at once: a constant, or a limit that follows what requests report.

With `adapts_concurrency` the limit rises while it is what holds requests back, and falls when requests wait
inside the engines or are preempted there (additive increase, multiplicative decrease; Chiu and Jain,
10.1016/0169-7552(89)90019-6).
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from slime.protocols import GenerateResult

QUEUED = 0.1
"""The limit falls if requests spend this part of their time in the engines' queues, or of them are preempted, ..."""
FREE = 0.02
"""... and rises if it is at most this part."""
FALL = 0.9
RISE = 1 / 16
"""Of the first limit, per window."""
LEAST = 1 / 16
"""Of the first limit: no lower."""


@dataclass
class Window:
    """Sums over finished requests. `full`: whether one of them ended while another waited for the limit."""

    requests: int = 0
    seconds: float = 0.0
    queued_s: float = 0.0
    preempted: int = 0
    full: bool = False


def next_limit(limit: int, first: int, seen: Window) -> int:
    """The limit after a window of requests. `first` is the limit at the start of the run."""
    queued = seen.queued_s / seen.seconds if seen.seconds > 0 else 0.0
    preempted = seen.preempted / max(seen.requests, 1)
    if max(queued, preempted) > QUEUED:
        return max(int(limit * FALL), int(first * LEAST), 1)
    if seen.full and queued <= FREE and not seen.preempted:
        return limit + max(int(first * RISE), 1)
    return limit


class Concurrency(asyncio.Semaphore):
    """A semaphore of `limit` samples. With `adapts`, `note` changes the limit after each window of requests.

    A lower limit acts as running samples end: none is ended for it.
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
        """Count a finished request, which took `seconds`. Engines that do not report the time in their queue leave the
        limit as it is."""
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
        """Other engines serve, whose limit at a start would be `first`: the present limit changes in proportion."""
        self.resize(max(self.limit * first // self.first, 1))
        self.first = first

    def resize(self, limit: int) -> None:
        """Let `limit` samples in at once."""
        self._owed += max(0, self.limit - limit)
        for _ in range(limit - self.limit):
            self.release()
        self.limit = limit
