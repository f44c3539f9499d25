"""Ctrl-C, SIGTERM and SIGHUP end a command in order: one line, and the exit code 128 + the number of the signal."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


def exit_code(interrupt: KeyboardInterrupt) -> int:
    """130 for Ctrl-C, 143 for SIGTERM, 129 for SIGHUP."""
    name = str(interrupt.args[0]) if interrupt.args else "SIGINT"
    return 128 + signal.Signals[name]


def by(interrupt: KeyboardInterrupt) -> str:
    """ " by SIGTERM", or nothing for Ctrl-C."""
    return f" by {interrupt.args[0]}" if interrupt.args else ""


stop = threading.Event()
"""Set when a run with --exit-signal-handler got its first SIGTERM: it ends with a checkpoint of its last step."""

_AGAIN_S = 5.0
"""A SIGTERM within this time is the first one once more: `timeout` and Slurm send it twice."""


def catch_signals(*, ends_step: bool = False) -> None:
    """SIGTERM and SIGHUP become Ctrl-C. nohup has SIGHUP ignored, and it stays so. `ends_step`: the first SIGTERM only
    sets `stop`."""
    for number in _signals():
        signal.signal(number, _interrupt)
    if ends_step and not stop.is_set():
        signal.signal(signal.SIGTERM, _ask)


def _ask(number: int, frame: FrameType | None) -> None:
    stop.set()
    line = b"SIGTERM: the run saves a checkpoint of its last step and ends; another SIGTERM ends it at once\n"
    os.write(2, line)
    began = time.monotonic()

    def again(number: int, frame: FrameType | None) -> None:
        if time.monotonic() - began > _AGAIN_S:
            _interrupt(number, frame)

    signal.signal(number, again)


def _signals() -> list[signal.Signals]:
    ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return [signal.SIGTERM] if ignored else [signal.SIGTERM, signal.SIGHUP]


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Once: `timeout` and Slurm send the signal twice, and the second one must not interrupt the end."""
    for each in _signals():
        signal.signal(each, signal.SIG_IGN)
    if number == signal.SIGHUP and sys.stderr.isatty():
        nowhere = os.open(os.devnull, os.O_WRONLY)  # the terminal is gone: printing would fail
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
    raise KeyboardInterrupt(signal.Signals(number).name)


@contextmanager
def nothing_to_end(command: str) -> Iterator[None]:
    """While a command is imported: a signal ends the process at once, because nothing was started. An exception would
    not do: code that is being imported may catch it, or print a traceback of its own."""

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
