"""Ends the processes of a driver that was killed (kill -9, out of memory).

The watchdog is a process next to the driver. It keeps a list of the driver's descendants. If the driver ends without
dismissing it, the watchdog kills the descendants that still run and removes the run's private directories. It is needed
because Ray's helpers run long after the end of their cluster. Ray also kills the supervisor of an engine before the
supervisor can end the engine.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

import psutil

_EVERY_S = 0.5
_DONE, _KILL = b"done", b"kill"
_TRACKER_S = 2.0
_PASSED = ("PATH", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "PYTHONHOME")
"""Variables of the driver's environment that Python itself may need."""


class Watchdog:
    """Kills the processes of a driver that was killed. Start it before anything else, and call `dismiss()` after the
    driver has stopped all parts."""

    def __init__(self, directories: Sequence[str]) -> None:
        command = [sys.executable, "-P", __file__, str(os.getpid()), *directories]
        # It lives as long as the run, and needs none of the run's keys.
        environ = {name: os.environ[name] for name in _PASSED if name in os.environ}
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True, env=environ)

    def dismiss(self) -> None:
        self._order(_DONE)

    def kill_all(self, *, remove: bool = False) -> None:
        """Kills the processes that the driver has started, and returns when none is left. With `remove`, the function
        also removes its directories."""
        self._order(b"" if remove else _KILL)

    def _order(self, order: bytes) -> None:
        if self._process.poll() is None:
            with contextlib.suppress(BrokenPipeError):
                self._process.communicate(order)


def main(argv: Sequence[str]) -> None:
    """Runs the watchdog. `argv` has the driver's pid and the directories to remove. Standard input is a pipe that the
    driver holds open."""
    driver, directories = int(argv[0]), argv[1:]
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # systemd and Slurm signal every process of a job
    seen: set[psutil.Process] = set()
    while True:
        seen = set(filter(is_running, seen)) | descendants(driver)
        if select.select([sys.stdin], [], [], _EVERY_S)[0]:
            break
    order = os.read(sys.stdin.fileno(), len(_DONE))
    if order == _DONE:
        return
    # A driver that waits for this process may have started others since the last search.
    seen |= descendants(driver)
    began = time.monotonic()
    while seen := set(filter(is_running, seen)):
        for process in list(seen):
            seen |= descendants(process.pid)
        for process in seen:
            if time.monotonic() - began > _TRACKER_S or not is_tracker(process):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        time.sleep(0.05)
    if order != _KILL:
        remove(directories)


def remove(directories: Sequence[str]) -> None:
    """Removes the directories. A process that ends may still write into a directory, so the function tries three
    times."""
    for directory in directories:
        for _ in range(3):
            shutil.rmtree(directory, ignore_errors=True)
            if not os.path.exists(directory):
                break
            time.sleep(0.1)


def is_stopped(process: psutil.Process) -> bool:
    """Returns True if a signal has stopped the process (SIGSTOP)."""
    return _status(process) == str(psutil.STATUS_STOPPED)


def is_running(process: psutil.Process) -> bool:
    """Returns False for a process that has ended, also if its parent has not yet read its exit status."""
    return _status(process) not in ("", str(psutil.STATUS_ZOMBIE))


def _status(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.NoSuchProcess):
        return str(process.status()) if process.is_running() else ""
    return ""


def is_tracker(process: psutil.Process) -> bool:
    """Returns True for Python's resource tracker.

    The tracker removes the semaphores and the shared memory of processes that were killed, and ends when these
    processes have ended.
    """
    with contextlib.suppress(psutil.Error):
        return any("multiprocessing.resource_tracker" in word for word in process.cmdline())
    return False


def descendants(pid: int, *, recursive: bool = True) -> set[psutil.Process]:
    """Returns the running processes below a process, or only its children. This process is never among them."""
    try:
        found = psutil.Process(pid).children(recursive=recursive)
    except psutil.NoSuchProcess:
        return set()
    return {process for process in found if process.pid != os.getpid() and is_running(process)}


if __name__ == "__main__":
    main(sys.argv[1:])
