"""The shared parts of the training queue and the sampling queue: waiting for results, and the tenants' turns."""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from collections.abc import Iterable

from vime.service.store import Row


def write_failure(message: str, category: str) -> bytes:
    """Returns the result of a failed request, with which the client raises an error. A `category` is user or server."""
    return json.dumps({"error": message, "category": category}).encode()


class Finished:
    """Wakes the requests that wait for a result, by the id of the request or of its owner."""

    def __init__(self) -> None:
        self._events: dict[str, set[asyncio.Event]] = defaultdict(set)

    def notify(self, *names: str) -> None:
        for name in names:
            for event in self._events.get(name, ()):
                event.set()

    async def wait(self, name: str, seconds: float) -> None:
        """Returns after the next `notify` for the name, or after `seconds`."""
        event = asyncio.Event()
        self._events[name].add(event)
        try:
            await asyncio.wait_for(event.wait(), seconds)
        except TimeoutError:
            pass
        finally:
            self._events[name].discard(event)
            if not self._events[name]:
                del self._events[name]


class FairOrder:
    """Chooses the next request so that each tenant has its turn, however many requests another tenant has."""

    def __init__(self) -> None:
        self._served: dict[str, int] = defaultdict(int)
        self._count = 0

    def choose(self, rows: Iterable[Row]) -> Row | None:
        """Returns the first row of the tenant whose last turn is longest ago. Counts as its turn."""
        first: dict[str, Row] = {}
        for row in rows:
            first.setdefault(row["tenant"], row)
        if not first:
            return None
        tenant = min(first, key=lambda name: self._served[name])
        self._count += 1
        self._served[tenant] = self._count
        return first[tenant]
