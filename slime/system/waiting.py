"""Waits for futures while it checks the engines, and reports long waits and servers that do not answer."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from concurrent.futures import Future
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")
logger = logging.getLogger(__name__)
_LOOK_EVERY_S = 0.5
_SAY_AFTER_S, _SAY_EVERY_S = 12.0, 30.0

_LOG_EVERY_S = 30.0
_logged_s: dict[str, float] = {}


def log_unanswered(server: str, fault: object, limit: str) -> None:
    """Logs that a request to `server` failed and is sent again until `limit` ends: once per server and half minute,
    because all samples of a rollout may wait for the same server."""
    now_s = time.monotonic()
    if now_s - _logged_s.get(server, float("-inf")) >= _LOG_EVERY_S:
        _logged_s[server] = now_s
        logger.warning("%s does not answer: %s; requests to it are sent again until %s", server, fault, limit)


def wait(future: Future[T], check_health: Callable[[], None], tick: Callable[[], None] | None = None) -> T:
    """Waits for the future and returns its result. Calls `check_health` and `tick` every half second.

    `check_health` raises an error if an engine is lost. The error ends the run, which would hang otherwise. `tick`
    redraws a progress bar.
    """
    while not futures.wait([future], timeout=_LOOK_EVERY_S).done:
        check_health()
        if tick is not None:
            tick()
    return future.result()


class Wait:
    """The state of a block that may take long. `on` names the object that the block waits for at the moment, or is ""
    if the block's name is clear enough."""

    def __init__(self) -> None:
        self.on = ""


@contextmanager
def report_wait(what: str) -> Iterator[Wait]:
    """Prints the block's work and the reason for its wait on stderr, after 12 s and then each half minute."""
    over, wait = threading.Event(), Wait()

    def say() -> None:
        waited_s = pause_s = _SAY_AFTER_S
        while not over.wait(pause_s):
            on = f"; it waits for {wait.on}" if wait.on else ""
            print(f"note: still {what}, for {waited_s:.0f} s{on}", file=sys.stderr, flush=True)
            pause_s = _SAY_EVERY_S
            waited_s += pause_s

    threading.Thread(target=say, name="said", daemon=True).start()
    try:
        yield wait
    finally:
        over.set()
