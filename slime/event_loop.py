"""Objects that belong to one event loop, such as limits of concurrency and connections, and the watch over a loop.

asyncio's locks and aiohttp's sessions work in one loop only. A run has a loop for its rollouts, and plug-ins may have
loops too, so that these objects are kept for each loop. All modules keep them here.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
import os
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar, cast
from weakref import WeakKeyDictionary

from slime.user_code import blocking_call

logger = logging.getLogger(__name__)
T = TypeVar("T")

_THREADS = min(32, (os.cpu_count() or 1) + 4)
"""Maximum number of a user's functions that run in threads and whose callers wait, as in asyncio's own threads."""
BLOCKED_S = 1.0
"""A call that blocks the event loop for this many seconds is logged, once per function."""


class LoopObjects:
    """The objects of one event loop, each made at its first use. Only code that runs in the loop may use them.

    `closes`: the loop's owner awaits `close` before the loop ends, so that connections may stay open until then.
    """

    def __init__(self) -> None:
        self.closes = False
        self._objects: dict[object, object] = {}
        self._ends: dict[object, Callable[[], Awaitable[object]]] = {}

    def get(
        self, key: object, make: Callable[[], T], end: Callable[[T], Awaitable[object]] | None = None
    ) -> T:
        """Returns the object of `key`, which the first call makes. `close` awaits `end(object)`."""
        if key not in self._objects:
            self._objects[key] = made = make()
            if end is not None:
                self._ends[key] = lambda: end(made)
        return cast(T, self._objects[key])

    def semaphore(self, key: object, size: int) -> asyncio.Semaphore:
        """Returns the semaphore of `key`, which the first call makes with `size` slots."""
        return self.get(key, lambda: asyncio.Semaphore(size))

    async def end(self, key: object) -> None:
        """Ends and removes the object of `key`, if it was made."""
        self._objects.pop(key, None)
        if (end := self._ends.pop(key, None)) is not None:
            await end()

    async def close(self) -> None:
        """Ends and forgets all objects, the newest first."""
        for key in reversed(list(self._objects)):
            await self.end(key)


_OF_LOOP: WeakKeyDictionary[asyncio.AbstractEventLoop, LoopObjects] = WeakKeyDictionary()


def loop_objects(loop: asyncio.AbstractEventLoop | None = None) -> LoopObjects:
    """Returns the objects of `loop`, which is the running loop by default."""
    loop = asyncio.get_running_loop() if loop is None else loop
    if loop not in _OF_LOOP:
        _OF_LOOP[loop] = LoopObjects()
    return _OF_LOOP[loop]


async def call_in_thread(function: Callable[[], T], begins: Callable[[], None] = lambda: None) -> T:
    """Returns the result of a user's function, which runs in a new thread. `begins` is called when the thread starts.

    asyncio has few threads. Functions that never return would soon occupy them all, and the run's other work would
    wait. At most `_THREADS` callers wait at the same time. After a caller is cancelled, its thread continues, and the
    next caller gets its slot.
    """
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[T] = loop.create_future()
    context = contextvars.copy_context()

    def set_result(result: T | None, error: BaseException | None) -> None:
        if ended.done():
            return
        if error is not None:
            ended.set_exception(error)
        else:
            ended.set_result(cast(T, result))

    def run() -> None:
        result, problem = None, None
        try:
            result = context.run(function)
        except BaseException as error:  # border of a thread: the caller raises it
            problem = RuntimeError(f"{error!r}") if isinstance(error, StopIteration) else error
        with contextlib.suppress(RuntimeError):  # the loop may have been closed
            loop.call_soon_threadsafe(set_result, result, problem)

    async with loop_objects().semaphore(call_in_thread, _THREADS):
        begins()
        threading.Thread(target=run, name="user-function", daemon=True).start()
        return await ended


def watch_loop(loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
    """Starts a daemon thread that logs each user's function that blocks `loop`, which `thread` runs."""
    beat = [time.monotonic()]

    def tick() -> None:
        beat[0] = time.monotonic()
        loop.call_later(BLOCKED_S / 4, tick)

    def watch() -> None:
        logged: set[str] = set()
        while True:
            time.sleep(BLOCKED_S / 4)
            if not thread.is_alive() or loop.is_closed():
                return
            if time.monotonic() - beat[0] < BLOCKED_S:
                continue
            task = asyncio.current_task(loop)
            found = task and blocking_call(task, sys._current_frames().get(thread.ident or 0))
            if found and found[0] not in logged:
                logged.add(found[0])
                logger.warning(
                    "%s blocks all other samples for over %g s at %s; use await or asyncio.to_thread there",
                    *(found[0], BLOCKED_S, found[1]),
                )

    loop.call_soon_threadsafe(tick)
    threading.Thread(target=watch, name="rollout-watch", daemon=True).start()
