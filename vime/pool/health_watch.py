"""Logs each engine that has not answered for a while, with the pool's next action, and records the engines' load.

The port of a stopped process (SIGSTOP) still accepts connections, so only a missing answer shows it.
"""

from __future__ import annotations

import http.client
import logging
import threading
import time
from collections.abc import Callable, Sequence

from vime.pool.control import ControlError, EngineLoad
from vime.pool.member import Member

logger = logging.getLogger(__name__)
SAY_AFTER_S = 15.0
_LOOK_EVERY_S, _ANSWER_S = 2.0, 2.0
_LOAD_EVERY_S = 5.0


class HealthWatch:
    """The thread that requests /health from every serving engine, and detects processes that a signal has stopped."""

    def __init__(
        self,
        members: Sequence[Member],
        stopping: threading.Event,
        patience_s: float,
        record: Callable[[Member, EngineLoad], None],
    ) -> None:
        """Stores the arguments. `patience_s` is the number of seconds without an answer after which the pool replaces
        an engine. The watch calls `record` with an engine's load when the load has changed."""
        self._members, self._stopping, self._patience_s = members, stopping, patience_s
        self._record = record
        self._loads: dict[str, tuple[float, EngineLoad]] = {}
        self._good: dict[str, float] = {}
        self._reported: set[str] = set()
        self._thread = threading.Thread(target=self._watch, name="engine-health-watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def _watch(self) -> None:
        while not self._stopping.wait(_LOOK_EVERY_S):
            for member in self._members:
                if member.serving:
                    self._look(member)

    def _look(self, member: Member) -> None:
        name, handle = member.name, member.handle
        assert handle is not None
        answers = member.control.is_healthy(_ANSWER_S)
        where, stopped = handle.whereabouts()
        now = time.monotonic()
        since = self._good.setdefault(name, now)
        if answers and not stopped:
            self._good[name] = now
            self._look_at_load(member, now)
            if name in self._reported:
                self._reported.remove(name)
                logger.warning(
                    "engine %s at %s works again after %.0f s", name, member.control.url, now - since
                )
        elif now - since >= SAY_AFTER_S and name not in self._reported and member.serving:
            self._reported.add(name)
            what = "is stopped" if answers else "has not answered"
            then = (
                "requests wait until --rollout-deadline-s"
                if answers
                else f"it is replaced after about {self._patience_s:.0f} s without an answer "
                "(--rollout-health-check-interval, --rollout-health-check-timeout)"
            )
            logger.warning(
                "engine %s at %s %s for %.0f s: %s; the run waits, and %s",
                *(name, member.control.url, what, now - since, where, then),
            )

    def _look_at_load(self, member: Member, now: float) -> None:
        """Records a changed load, at most every _LOAD_EVERY_S seconds. A failed request is ignored, because a silent
        engine fails the next health check."""
        at, known = self._loads.get(member.name, (0.0, None))
        if now - at < _LOAD_EVERY_S:
            return
        try:
            load = member.control.load()
        except (ControlError, OSError, http.client.HTTPException):
            return
        if load is not None:
            self._loads[member.name] = (now, load)
            if load != known:
                self._record(member, load)
