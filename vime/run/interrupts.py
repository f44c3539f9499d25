"""Makes Ctrl-C, SIGTERM and SIGHUP end a command in order: one line, and the exit code 128 + the signal's number."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_ended_by: list[str] = []
"""Name of the signal that `_interrupt` has received. While Ray waits for an actor, it replaces the exception of a
signal handler with a KeyboardInterrupt without a name."""


def exit_code(interrupt: KeyboardInterrupt) -> int:
    """Returns 130 for Ctrl-C, 143 for SIGTERM, 129 for SIGHUP."""
    return 128 + signal.Signals[_name(interrupt)]


def by(interrupt: KeyboardInterrupt) -> str:
    """Returns " by SIGTERM", or "" for Ctrl-C."""
    name = _name(interrupt)
    return "" if name == "SIGINT" else f" by {name}"


def _name(interrupt: KeyboardInterrupt) -> str:
    return str([*interrupt.args, *_ended_by, "SIGINT"][0])


stop = threading.Event()
"""Set by the first signal in `asks_first`: the run then ends with a checkpoint of its last step."""

_AGAIN_S = {signal.SIGTERM: 5.0, signal.SIGINT: 0.3}
"""Seconds within which the same signal counts as a repetition of the first one.

`timeout` and Slurm send a signal twice. A person who presses Ctrl-C twice takes longer.
"""
_NAMES = {signal.SIGINT: "Ctrl-C"}
_asked_by: list[str] = []


def catch_signals() -> None:
    """Turns SIGTERM and SIGHUP into Ctrl-C. Under nohup, SIGHUP stays ignored."""
    _ended_by.clear()
    for number in _signals():
        signal.signal(number, _interrupt)


@contextmanager
def asks_first(*numbers: signal.Signals) -> Iterator[None]:
    """Lets the first of these signals only set `stop` in this context, and the next one end the run at once. A repeat
    of the same signal within `_AGAIN_S` seconds does nothing. A signal that is ignored stays ignored, such as Ctrl-C in
    the background of a script."""
    heeded = [number for number in numbers if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.getsignal(number) for number in heeded}

    def ask(number: int, frame: FrameType | None) -> None:
        stop.set()
        name = signal.Signals(number).name
        _asked_by.append(name)
        shown = _NAMES.get(signal.Signals(number), name)
        line = f"{shown}: the run saves a checkpoint of its last step and ends; another {shown} ends it at once\n"
        os.write(2, line.encode())
        began = time.monotonic()

        def again(later: int, frame: FrameType | None) -> None:
            if later == number and time.monotonic() - began < _AGAIN_S[signal.Signals(number)]:
                return
            then = before[signal.Signals(later)]
            signal.signal(later, then)
            os.kill(os.getpid(), later)

        for each in heeded:
            signal.signal(each, again)

    for number in heeded:
        signal.signal(number, ask)
    try:
        yield
    finally:
        for number in heeded:
            signal.signal(number, before[number])


def interrupt_error() -> KeyboardInterrupt:
    """Returns the exception for the signal that set `stop`."""
    return KeyboardInterrupt(*(name for name in _asked_by[:1] if name != "SIGINT"))


def _signals() -> list[signal.Signals]:
    ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return [signal.SIGTERM] if ignored else [signal.SIGTERM, signal.SIGHUP]


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Raises KeyboardInterrupt, and ignores further signals.

    `timeout` and Slurm send the signal twice, and the second one must not interrupt the end.
    """
    for each in _signals():
        signal.signal(each, signal.SIG_IGN)
    if number == signal.SIGHUP and sys.stderr.isatty():
        nowhere = os.open(os.devnull, os.O_WRONLY)  # the terminal is closed, so printing would fail
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
    _ended_by.append(signal.Signals(number).name)
    raise KeyboardInterrupt(*_ended_by)


@contextmanager
def nothing_to_end(command: str) -> Iterator[None]:
    """Lets a signal end the process at once during the import of a command, because nothing was started.

    An exception would not be reliable: code that is being imported may catch it, or print its own traceback.
    """

    def leave(number: int, frame: FrameType | None) -> None:
        line = f"vime {command}: interrupted by {signal.Signals(number).name} before anything was started\n"
        os.write(2, line.encode(errors="replace"))
        os._exit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    heeded = [*_signals(), signal.SIGINT]
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # in the background of a script
        heeded.remove(signal.SIGINT)
    before = {number: signal.signal(number, leave) for number in heeded}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
