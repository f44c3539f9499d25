"""Runs slow functions in threads, so that they do not block the event loop that serves all samples."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_AT_ONCE = 1 << 15
"""Number of characters or bytes that can be read, rendered and tokenised within a few milliseconds."""
_threads = ThreadPoolExecutor(2, thread_name_prefix="session-text")
"""These threads are separate from the event loop's own threads, which reward functions may hold for minutes."""
_parsers = ThreadPoolExecutor(2, thread_name_prefix="session-parser")
"""A parser that takes minutes may hold these threads, and no request waits for them."""


async def off_loop(size: int, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Calls the function and returns its result. `size` is the length of the texts that the function reads. Short texts
    need no thread."""
    if size <= _AT_ONCE:
        return function(*args, **kwargs)
    return await asyncio.get_running_loop().run_in_executor(_threads, partial(function, *args, **kwargs))


async def within(seconds: float, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Calls the function in a parser thread and returns its result. Raises TimeoutError after `seconds`. Python cannot
    end a thread, so the function then continues in its thread."""
    async with asyncio.timeout(seconds):
        return await asyncio.get_running_loop().run_in_executor(_parsers, partial(function, *args, **kwargs))
