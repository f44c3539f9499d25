"""Measures the parts of a start in the driver, from the begin of its process to the first weights in the engines."""

from __future__ import annotations

import os
import time
from pathlib import Path

from slime.tracking.events import Events
from slime.tracking.run_record import born


class StartTimes:
    """The parts of a start, which follow each other without gaps. Times are in seconds.

    `age` is the time since the process began. It belongs to the first part.
    """

    def __init__(self, age: float) -> None:
        self.parts: dict[str, float] = {}
        self._last = time.monotonic() - age

    def end(self, part: str) -> None:
        """Ends a part. The next part begins."""
        now = time.monotonic()
        self.parts[part], self._last = now - self._last, now

    def report(self, events: Events) -> str:
        """Records the parts in the journal, and returns a line with them. The line leaves out parts that took no time,
        such as the engines of a run without engines."""
        total = sum(self.parts.values())
        rounded = {part: round(seconds, 2) for part, seconds in self.parts.items()}
        events.add("started", seconds=round(total, 2), parts=rounded)
        words = (f"{part} {seconds:.1f}" for part, seconds in self.parts.items() if seconds >= 0.05)
        return f"started in {total:.1f} s: {', '.join(words)}"


def process_age() -> float:
    """Returns the time since this process began, in seconds, or 0 if the system does not report it."""
    ticks = born(os.getpid())
    if ticks is None:
        return 0.0
    uptime = float(Path("/proc/uptime").read_text(encoding="ascii").split()[0])
    return max(0.0, uptime - ticks / os.sysconf("SC_CLK_TCK"))
