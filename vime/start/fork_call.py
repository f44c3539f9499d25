"""Runs a call in a forked process. The call's memory and imported modules end with that process."""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable
from typing import NoReturn, TypeVar

from vime.pool.supervise import die_with_parent

T = TypeVar("T")


class OverLimit(Exception):
    """A call exceeded its time limit, and its process was killed."""


def run_in_fork(call: Callable[[], T], what: str, *, limit_s: float | None = None) -> T:
    """Runs `call` in a fork of this process and returns its result. The result must be picklable.

    With `limit_s`, the fork and its child processes form a process group, which is killed after `limit_s` seconds.

    Raises:
        ValueError: `call` raised ValueError. Both errors have the same text.
        RuntimeError: `call` raised another exception, whose traceback is in the text, or the process was killed. The
            text begins with `what`.
        OverLimit: `call` did not end within `limit_s`.
    """
    reading, writing = os.pipe()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()  # Otherwise the fork writes the buffered text a second time.
    child = os.fork()
    if child == 0:
        os.close(reading)
        if limit_s is not None:
            os.setpgid(0, 0)
        _answer(call, writing)
    os.close(writing)
    try:
        with open(reading, "rb") as answers:
            answer = answers.read() if limit_s is None else _read_within(reading, limit_s)
    except BaseException:  # Ctrl-C
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
            if limit_s is not None:
                os.killpg(child, signal.SIGKILL)
        raise
    finally:
        _, status = os.waitpid(child, 0)
    if not answer:
        raise RuntimeError(
            f"{what} must end with a result, got exit code {os.waitstatus_to_exitcode(status)} of its process; a "
            "process that the system killed may have needed more memory than there is"
        )
    kind, value = pickle.loads(answer)  # ok: from a fork of this process, through its own pipe
    if kind is ValueError:
        raise ValueError(value)
    if kind is RuntimeError:
        raise RuntimeError(
            f"{what} must end without an exception, got this one; its last line says what to change:\n{value}"
        )
    result: T = value
    return result


def _read_within(reading: int, limit_s: float) -> bytes:
    """Reads the pipe to its end and returns the bytes. Raises OverLimit after `limit_s` seconds."""
    end, parts = time.monotonic() + limit_s, list[bytes]()
    while select.select([reading], [], [], max(0.0, end - time.monotonic()))[0]:
        parts.append(os.read(reading, 1 << 16))
        if not parts[-1]:
            return b"".join(parts)
    raise OverLimit(f"no end within {limit_s:g} s")


def _answer(call: Callable[[], object], writing: int) -> NoReturn:
    die_with_parent()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)  # The parent prints the message about the signal.
    code = 1
    try:
        answer: tuple[type[Exception] | None, object] = (None, call())
    except ValueError as error:
        answer = (ValueError, str(error))
    except Exception:  # the border of the process: the parent raises it
        answer = (RuntimeError, traceback.format_exc())
    try:
        with open(writing, "wb") as file:
            pickle.dump(answer, file)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        code = 0
    finally:
        os._exit(code)
