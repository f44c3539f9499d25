"""Wall time by name. Owns measuring; the caller chooses what to measure and names it (`perf/{name}_time`)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Timers:
    """Wall seconds per name since the last `flush`. One instance a thread, passed to where it is used.

    Different names nest freely and each gets its full (inclusive) time: `train` holds `actor_train`. The same
    name entered again while it runs (nested, or by overlapping coroutines) counts the wall time once, not
    twice.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._seconds: dict[str, float] = {}
        self._depth: dict[str, int] = {}
        self._start: dict[str, float] = {}

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Add the wall seconds of the block to `name`, also when the block raises."""
        depth = self._depth.get(name, 0)
        if depth == 0:
            self._start[name] = self._clock()
        self._depth[name] = depth + 1
        try:
            yield
        finally:
            self._depth[name] -= 1
            if self._depth[name] == 0:
                elapsed = self._clock() - self._start.pop(name)
                self._seconds[name] = self._seconds.get(name, 0.0) + elapsed

    def flush(self) -> dict[str, float]:
        """`{perf/{name}_time: seconds}` of the blocks that ended since the last call, not of running ones.

        When both `train_wait` and `train` are among them, adds `perf/step_time` = train_wait + train (unless
        `step` was itself measured) and `perf/wait_time_ratio` = train_wait / step_time in [0, 1].
        """
        seconds, self._seconds = self._seconds, {}
        times = {f"perf/{name}_time": value for name, value in seconds.items()}
        if "train_wait" in seconds and "train" in seconds:
            step_time = times.setdefault("perf/step_time", seconds["train_wait"] + seconds["train"])
            if step_time > 0:
                times["perf/wait_time_ratio"] = seconds["train_wait"] / step_time
        return times
