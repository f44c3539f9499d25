"""Ends generate functions whose requests the engines' abort does not reach, such as an agent's requests to another
server.

A plug-in sets `generate.abort_mode = "request"` on its function. When the rollout has all samples that it needs, the
function's task is cancelled, and its sample is aborted. Without the attribute, the rollout ends the engines' requests,
and the function then returns normally.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeAlias, TypeVar

from slime.hooks import Hook
from slime.rollout.state import GenerateState
from slime.types import Sample

Result: TypeAlias = Sample | list[Sample]
T = TypeVar("T")

ATTRIBUTE = "abort_mode"
MODES = ("request", "server")


class CancelledCalls:
    """The running calls of functions whose abort mode is "request"."""

    def __init__(self) -> None:
        self._cancels: set[Callable[[], bool]] = set()

    def abort_all(self) -> None:
        """Cancels the running calls. Must be called in the event loop of the calls."""
        for cancel in self._cancels:
            cancel()

    async def result(self, call: Awaitable[Result], sample: Sample) -> Result:
        """Returns the call's result, or the sample with the status ABORTED if `abort_all` has cancelled the call."""
        made = await self.run(call)
        if made is None:
            sample.status = Sample.Status.ABORTED
            return sample
        return made

    async def run(self, call: Awaitable[T]) -> T | None:
        """Returns the call's result, or None if `abort_all` has cancelled the call."""
        task = asyncio.ensure_future(call)
        self._cancels.add(task.cancel)
        try:
            await asyncio.wait([task])
        finally:
            self._cancels.discard(task.cancel)
            task.cancel()  # it does nothing to a task that has ended
        return None if task.cancelled() else task.result()


def abort_calls(state: GenerateState) -> None:
    """Cancels the run's calls of such functions."""
    if (calls := state.has_part(CancelledCalls)) is not None:
        calls.abort_all()


def cancels_its_call(function: Hook) -> bool:
    """Returns True if the function's `abort_mode` is "request". Raises ValueError for a value that is not in MODES."""
    mode = getattr(function, ATTRIBUTE, None)
    if mode is not None and mode not in MODES:
        raise ValueError(
            f"{ATTRIBUTE} must be {' or '.join(MODES)}, got {mode!r}; correct it on {function.__name__}"
        )
    return bool(mode == MODES[0])
