"""Handles the border with a user's functions: the origin of errors, slow rewards, and calls that block the event loop.

All samples share one event loop. An error that ends the loop, or a call that blocks it, stops every sample.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import sysconfig
import time
import traceback
from collections.abc import Iterator
from types import FrameType
from weakref import WeakKeyDictionary

from slime.config.child_environment import NO_KEY
from slime.types import Sample

logger = logging.getLogger(__name__)

SLOW_REWARD_S = 30.0
"""A warning is logged for a reward that runs longer than this time. At most one warning is logged per such interval."""
_FOREIGN_FILES = (
    "<",
    *(
        os.path.join(os.path.dirname(os.path.dirname(__file__)), name, "")
        for name in ("slime", "vime", "rl_kernel")
    ),
    *(os.path.join(sysconfig.get_path(name), "") for name in ("stdlib", "platstdlib")),
)
_CLIENTS = ("aiohttp", "httpx", "requests", "urllib", "urllib3", "http", "openai")
_PACKAGES = re.compile(r"[/\\](site|dist)-packages[/\\]")

_FRAME = re.compile(r'File "([^"]+)", line (\d+)')
_FOLLOWED = re.compile(
    r"(?m)^.*The above exception was the direct cause|^.*During handling of the above exception"
)

_running: dict[object, str] = {}
_last_warning_s = float("-inf")


def is_cancelled(error: BaseException) -> bool:
    """Returns True if `error` is the cancellation of the current task, which no caller may turn into another error.

    All other exceptions are errors, also a SystemExit of a user's function, which would end the event loop and hang the
    run.
    """
    if isinstance(error, GeneratorExit):
        return True
    task = asyncio.current_task()
    return isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling() > 0


def find_location_in(trace: str) -> str | None:
    """Returns the location in the user's code, as `find_location` does, from another process's traceback text. If the
    text has several chained tracebacks, the first one with user code counts."""
    for one in _FOLLOWED.split(trace):
        locations = [f"{_short(file)}:{line}" for file, line in _FRAME.findall(one) if _is_user_file(file)]
        if locations:
            return locations[-1]
    return None


def add_location(message: str, trace: str) -> str:
    """Returns an error's message in one line, with the place in the user's code that raised the error."""
    found = find_location_in(trace)
    return message if found is None or found in message else f"{message} (at {found})"


def remedy(error: BaseException, *, generates: bool = False) -> str:
    """Returns the remedy for an error that a user's function has because of the place where it runs, else "".
    `generates` means that the function sends its requests to the run's router."""
    if any(_refuses(value, generates) for value in _seen(error)):
        return (
            "; the router refused a request without the run's key (401): send it with slime.utils.http_utils.post, "
            "which adds the key"
        )
    if isinstance(error, ValueError) and "signal only works in main thread" in str(error):
        return (
            "; it runs in a thread, where signal.signal and signal.alarm cannot limit the time: give "
            "--reward-deadline-s, or compute in a process of your own (math_verify: parsing_timeout=None)"  # ok: a text
        )
    return ""


def _seen(error: BaseException) -> Iterator[object]:
    """Yields the error and the errors that it comes from, their responses, and the local values of the user's code."""
    known: set[int] = set()
    one: BaseException | None = error
    while one is not None and id(one) not in known:
        known.add(id(one))
        yield from (one, getattr(one, "response", None))
        for frame, _ in traceback.walk_tb(one.__traceback__):
            if _is_user_file(frame.f_code.co_filename):
                yield from frame.f_locals.values()
        one = one.__cause__ or one.__context__


def _refuses(value: object, generates: bool) -> bool:
    """Returns True if a value is the reply of a run's server to a request without the key. With `generates`, also
    returns True if an HTTP client's object has status 401."""
    if isinstance(value, str | bytes | dict | BaseException):
        text = value.decode(errors="replace") if isinstance(value, bytes) else str(value)
        if NO_KEY in text:
            return True
    of_client = type(value).__module__.partition(".")[0] in _CLIENTS
    statuses = (getattr(value, name, None) for name in ("status", "status_code", "code"))
    return generates and of_client and any(status == 401 for status in statuses)


def _is_user_file(file: str) -> bool:
    return not file.startswith(_FOREIGN_FILES) and not _PACKAGES.search(file)


def find_location(error: BaseException) -> str | None:
    """Returns the file and line of the user's code that raised `error`, or that called the code that raised it. Returns
    None for an error of this project's own code."""
    found = None
    for frame, line in traceback.walk_tb(error.__traceback__):
        file = frame.f_code.co_filename
        if _is_user_file(file):
            found = f"{_short(file)}:{line}"
    return found


def _short(file: str) -> str:
    """Returns the path from the current folder if the file is below this folder, else the path as it is."""
    near = os.path.relpath(file)
    return file if near.startswith("..") else near


@contextlib.contextmanager
def slow_is_logged(what: str, limit_s: float | None) -> Iterator[None]:
    """Logs a warning if the block is not done after SLOW_REWARD_S. `limit_s` is the value of --reward-deadline-s."""
    key = object()
    _running[key] = what
    timer = asyncio.get_running_loop().call_later(SLOW_REWARD_S, _warn, what, limit_s)
    try:
        yield
    finally:
        timer.cancel()
        del _running[key]


def _warn(what: str, limit_s: float | None) -> None:
    global _last_warning_s
    if time.monotonic() - _last_warning_s < SLOW_REWARD_S:
        return
    _last_warning_s = time.monotonic()
    logger.warning(
        "%s has not returned for %g s; rewards that run: %d; the run ends after --reward-deadline-s %s",
        *(what, SLOW_REWARD_S, len(_running), limit_s),
    )


_CALLS: WeakKeyDictionary[asyncio.Task[object], str] = WeakKeyDictionary()
"""The user's function that each task of an event loop runs: its flag and its path."""


@contextlib.contextmanager
def calling(function: str) -> Iterator[None]:
    """Records that the current task runs a user's function in this block. `function` is the function's flag and
    path."""
    task = asyncio.current_task()
    if task is None:
        yield
        return
    outer = _CALLS.get(task)
    _CALLS[task] = function
    try:
        yield
    finally:
        if outer is None:
            del _CALLS[task]
        else:
            _CALLS[task] = outer


def blocking_call(task: asyncio.Task[object], frame: FrameType | None) -> tuple[str, str] | None:
    """Returns the user's function that `task` runs, and the file and line that it has reached. Returns None for a task
    that runs no user's function. `frame` is the innermost one of the loop's thread."""
    function = _CALLS.get(task)
    reached = None
    while frame is not None:
        if not frame.f_code.co_filename.startswith(_FOREIGN_FILES):
            reached = f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return None if function is None or reached is None else (function, reached)


@contextlib.contextmanager
def blamed(what: str, sample: Sample) -> Iterator[None]:
    """Adds the sample and the name of a user's function, `what`, to any error of the block. Raises RuntimeError,
    chained."""
    try:
        with calling(what):
            yield
    except BaseException as error:
        if is_cancelled(error):
            raise
        advice = remedy(error, generates=what.startswith("--custom-generate-function-path"))
        raise RuntimeError(
            f"{what} failed on sample {sample.index} of group {sample.group_index}: "
            f"{type(error).__name__}: {error}{advice}{f' (at {found})' if (found := find_location(error)) else ''}"
        ) from error
