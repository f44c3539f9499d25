"""Ends the processes of a driver that was killed (kill -9, out of memory). Linux, standard library only.

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
        """Kills the processes that the driver has started, and returns when none is left. `remove`: also removes its
        directories."""
        self._order(b"" if remove else _KILL)

    def _order(self, order: bytes) -> None:
        if self._process.poll() is None:
            with contextlib.suppress(BrokenPipeError):
                self._process.communicate(order)


def main(argv: Sequence[str]) -> None:
    """Runs the watchdog. `argv`: pid of the driver, directories to remove. Standard input is a pipe that the driver
    holds open."""
    driver, directories = int(argv[0]), argv[1:]
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # systemd and Slurm signal every process of a job
    seen: dict[int, str] = {}
    while True:
        table = processes()
        seen = alive(seen, table) | descendants({driver}, table)
        if select.select([sys.stdin], [], [], _EVERY_S)[0]:
            break
    order = os.read(sys.stdin.fileno(), len(_DONE))
    if order == _DONE:
        return
    began = time.monotonic()
    while seen := alive(seen, table := processes()):
        seen |= descendants(set(seen), table)
        for pid in seen:
            if time.monotonic() - began > _TRACKER_S or not is_tracker(pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
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


def is_stopped(pid: int) -> bool:
    """Returns True if a signal has stopped the process (SIGSTOP)."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
        return file.read().rpartition(")")[2].split()[0] == "T"
    return False


def is_tracker(pid: int) -> bool:
    """Returns True for Python's resource tracker.

    The tracker removes the semaphores and the shared memory of processes that were killed, and ends when these
    processes have ended.
    """
    with contextlib.suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as file:
        return b"multiprocessing.resource_tracker" in file.read()
    return False


def processes() -> dict[int, tuple[int, str]]:
    """Returns pid -> (parent, start time) of every running process. pid and start time together identify a process."""
    table = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with (
                contextlib.suppress(OSError),
                open(f"/proc/{entry}/stat", encoding="utf-8", errors="replace") as file,
            ):
                # The second field is a name in brackets and may contain brackets, so split at the last bracket.
                fields = file.read().rpartition(")")[2].split()
                if fields[0] != "Z":
                    table[int(entry)] = (int(fields[1]), fields[19])
    return table


def alive(seen: dict[int, str], table: dict[int, tuple[int, str]]) -> dict[int, str]:
    return {pid: started for pid, started in seen.items() if pid in table and table[pid][1] == started}


def descendants(roots: set[int], table: dict[int, tuple[int, str]]) -> dict[int, str]:
    """Returns pid -> start time for every descendant of `roots`, without this process."""
    found: dict[int, str] = {}
    fresh = roots
    while fresh:
        fresh = {
            pid for pid, (parent, _) in table.items() if parent in fresh and pid != os.getpid()
        } - found.keys()
        found |= {pid: table[pid][1] for pid in fresh}
    return found


if __name__ == "__main__":
    main(sys.argv[1:])
