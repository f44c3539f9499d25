"""A call in a process of its own: the memory that it takes, and the modules that it imports, end with that process."""

from __future__ import annotations

import os
import pickle
import signal
import sys
import traceback
from collections.abc import Callable
from typing import NoReturn, TypeVar

from vime.pool.supervise import die_with_parent

T = TypeVar("T")


def apart(call: Callable[[], T], what: str) -> T:
    """What `call` returns, from a fork of this process. The result must pickle.

    Raises:
        ValueError: with the same text, if `call` raised one.
        RuntimeError: for any other exception of `call`, with its traceback, and if the process was killed. Its text
            begins with `what`.
    """
    reading, writing = os.pipe()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()  # otherwise the fork writes it once more
    child = os.fork()
    if child == 0:
        os.close(reading)
        _answer(call, writing)
    os.close(writing)
    try:
        with open(reading, "rb") as answers:
            answer = answers.read()
    except BaseException:  # Ctrl-C
        os.kill(child, signal.SIGKILL)
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


def _answer(call: Callable[[], object], writing: int) -> NoReturn:
    die_with_parent()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)  # the parent says what a signal has interrupted
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
