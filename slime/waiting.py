"""Waiting for a future while the engines are watched."""

from __future__ import annotations

from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")
_LOOK_EVERY_S = 0.5


def wait(future: Future[T], check_health: Callable[[], None], tick: Callable[[], None] | None = None) -> T:
    """The future's result. `check_health` raises when an engine is lost: that ends the run, which would hang otherwise.

    `tick`, called every half second, redraws a progress bar.
    """
    while not futures.wait([future], timeout=_LOOK_EVERY_S).done:
        check_health()
        if tick is not None:
            tick()
    return future.result()
