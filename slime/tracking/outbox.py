"""Collects metrics that a function of the user logs in a process without trackers.

The metrics wait here. The answer of the process's next call (a rollout, an evaluation, a training) returns them to the
driver, which has the trackers.

`slime.utils.logging_utils.log` is `log`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import SupportsFloat

from slime.protocols import Logged
from slime.tracking.metrics import as_floats, as_step_key

_lock = threading.Lock()
_waiting: list[Logged] | None = None
"""Metrics that wait for the driver, or None in a process whose answers no driver reads."""
_collected: ContextVar[list[Logged] | None] = ContextVar("collected", default=None)


def begin() -> None:
    """Starts collecting: the driver reads the metrics that this process logs from now on. Discards waiting metrics."""
    global _waiting
    with _lock:
        _waiting = []


def log(args: object, metrics: Mapping[str, SupportsFloat], step_key: str) -> None:
    """Sends numbers to metrics.jsonl and to the trackers of this run, at the step `metrics[step_key]`.

    `step_key` is rollout/step, train/step or eval/step. `args` exists for slime's signature and is not read. Every
    thread of the rollout manager and of a trainer rank may call it. Raises ValueError for another step key, without a
    step, for a value that is not one number, and in another process.
    """
    key, numbers = as_step_key(step_key), as_floats(metrics)
    if key not in numbers:
        raise ValueError(
            f"metrics must hold their step as {key}, got {sorted(numbers)}; "
            f"set metrics[{key!r}] = compute_rollout_step(args, rollout_id)"
        )
    one = Logged(numbers, int(numbers.pop(key)), key)
    if (collected := _collected.get()) is not None:
        collected.append(one)
        return
    with _lock:
        if _waiting is None:
            raise ValueError(
                "log must be called in the process of the rollouts or of a trainer rank, got a call in another one; "
                "return the numbers to the function that runs there"
            )
        _waiting.append(one)


def take() -> list[Logged]:
    """Returns the metrics logged since the last call, outside `collected`."""
    global _waiting
    with _lock:
        taken = _waiting or []
        if _waiting is not None:
            _waiting = []
    return taken


@contextmanager
def collected() -> Iterator[list[Logged]]:
    """Yields a list that receives the metrics that the block logs in its own thread."""
    found: list[Logged] = []
    token = _collected.set(found)
    try:
        yield found
    finally:
        _collected.reset(token)
