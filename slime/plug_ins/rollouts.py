"""Functions that rollout functions of plug-ins call. slime's async_utils, misc and sleep_rollout have these names."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Coroutine
from typing import NoReturn, TypeVar

from slime.rollout.context import run_in_process
from slime.rollout.state import entered

T = TypeVar("T")
logger = logging.getLogger(__name__)
_WAIT_S = 600.0


def sleep(args: object, rollout_id: int, data_source: object, evaluation: bool = False) -> NoReturn:
    """Waits until the run is stopped (`--rollout-function-path slime.rollout.sleep_rollout.sleep`).

    The engines of the run take requests in this time, so a person can measure them. A line is logged every ten minutes.
    """
    never = threading.Event()
    while True:
        logger.info("rollout %s only waits; the engines take requests until you stop the run", rollout_id)
        never.wait(_WAIT_S)


class AsyncLoop:
    """The event loop of this process's rollout, or a separate loop in a process without a rollout."""

    def run(self, coro: Coroutine[object, object, T]) -> T:
        """Runs the coroutine to its end, see `slime.rollout.context.run_in_process`."""
        return run_in_process(coro)

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """Returns the event loop, for asyncio.run_coroutine_threadsafe."""

        async def current() -> asyncio.AbstractEventLoop:
            return asyncio.get_running_loop()

        state = entered()
        running = None if state is None else state.loop
        return run_in_process(current()) if running is None else running


def get_async_loop() -> AsyncLoop:
    """Returns the loop in which `slime.utils.async_utils.run` runs coroutines."""
    return AsyncLoop()


def should_run_periodic_action(
    rollout_id: int,
    interval: int | None,
    num_rollout_per_epoch: int | None = None,
    num_rollout: int | None = None,
) -> bool:
    """Returns True if an action is due after the rollout: after every `interval` rollouts, at the end of an epoch, and
    after the last of `num_rollout` rollouts. Returns False without an interval."""
    if interval is None:
        return False
    done = rollout_id + 1
    ends = done % interval == 0 or done == num_rollout
    return ends or (num_rollout_per_epoch is not None and done % num_rollout_per_epoch == 0)
