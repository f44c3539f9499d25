"""The processes of a sandbox: which they are, what they hold, how all of them end."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from collections.abc import Callable

_SIZES = re.compile(rb"^(VmRSS|HugetlbPages|VmPTE):\s+(\d+) kB", re.MULTILINE)


class Namespace:
    """Handles all processes of a process namespace except `first`, its process 1. The caller is outside the namespace
    and sees its /proc, so every number here is a number in the namespace."""

    def __init__(self, first: int) -> None:
        self.first = first
        """The number of process 1 outside the namespace."""
        self._lost = False

    def pids(self) -> list[int]:
        return [int(name) for name in os.listdir("/proc") if name.isdigit() and name != "1"]

    def send(self, pids: set[int], number: int) -> None:
        _in_child(lambda: send(pids, number))

    def kill(self) -> None:
        """Ends all except process 1, which a signal to everyone does not reach."""
        for _ in range(1000):
            _in_child(lambda: os.kill(-1, signal.SIGKILL))
            reap()
            if self.lost() or not self.pids():
                return
            time.sleep(0.002)

    def lost(self) -> bool:
        """Returns whether process 1 has ended, and with it every process."""
        self._lost = self._lost or self.first in ended
        return self._lost

    def end(self) -> None:
        """The kernel ends every process of the namespace with process 1."""
        if not self.lost():
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(self.first, signal.SIGKILL)
                os.waitpid(self.first, 0)


class Family:
    """The sandbox's processes are the descendants of this one, which is their subreaper: a process whose parents have
    ended becomes its child, however often it forked."""

    def __init__(self, uid: int | None) -> None:
        self.uid = uid
        """The sandbox's own user, None if it shares this process's user."""

    def pids(self) -> list[int]:
        found, todo = [], [os.getpid()]
        while todo:
            children = _children(todo.pop())
            found += children
            todo += children
        return found

    def send(self, pids: set[int], number: int) -> None:
        send(pids, number)

    def lost(self) -> bool:
        return False

    def kill(self) -> None:
        """End all. First all are stopped, until no new one appears, so that none can fork while others are killed."""
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            if self.uid is not None:
                _as_user(self.uid, signal.SIGKILL)
            seen: set[int] = set()
            while new := set(self.pids()) - seen:
                seen |= new
                send(new, signal.SIGSTOP)
            send(seen, signal.SIGKILL)
            reap()
            if not self.pids():
                return
            time.sleep(0.002)


def _as_user(uid: int, number: int) -> None:
    """Signal to every process of the user, which one call of that user does at once, a fork bomb included."""

    def action() -> None:
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
        os.kill(-1, number)

    _in_child(action)


def _in_child(action: Callable[[], None]) -> None:
    """Runs `action` in a child, which is in the namespace of processes, and waits for the child."""
    try:
        child = os.fork()
    except OSError:
        # The caller tries again, or process 1 has ended and nobody is left.
        return
    if child == 0:
        try:
            action()
        finally:
            os._exit(0)
    with contextlib.suppress(ChildProcessError):
        os.waitpid(child, 0)


ended: dict[int, int] = {}
"""Process to wait status, of those that `reap` met and nobody has asked for yet."""


def reap() -> None:
    """Take the exit of every child that has ended, so that no zombie stays."""
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            ended[pid] = status


def send(pids: set[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def of_command(pids: list[int], leader: int) -> set[int]:
    """Those of `pids` that the command with this leader started and that did not leave its session, with their
    descendants."""
    parent, session = {}, {}
    for pid in pids:
        if values := _stat(pid):
            parent[pid], session[pid] = int(values[1]), int(values[3])
    members = {pid for pid in session if pid == leader or session[pid] == leader}
    while True:
        more = {pid for pid in parent if pid not in members and parent[pid] in members}
        if not more:
            return members
        members |= more


def memory_bytes(pids: list[int], limit: int, other: int) -> int:
    """Adds up the resident memory and the page tables of all processes, and `other`. Shared pages count once, but only
    if the plain sum is beyond `limit`."""
    resident = tables = 0
    for pid in pids:
        with (
            contextlib.suppress(OSError, ValueError, IndexError),
            open(f"/proc/{pid}/status", "rb") as file,
        ):
            sizes = {name: int(size) * 1024 for name, size in _SIZES.findall(file.read())}
            resident += sizes.get(b"VmRSS", 0) + sizes.get(b"HugetlbPages", 0)
            tables += sizes.get(b"VmPTE", 0)
    if resident + tables + other <= limit:
        return resident + tables + other
    return sum(_proportional_bytes(pid) for pid in pids) + tables + other


def _proportional_bytes(pid: int) -> int:
    with (
        contextlib.suppress(OSError),
        open(f"/proc/{pid}/smaps_rollup", encoding="utf-8") as file,
    ):
        for line in file:
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return 0


def tasks_of_user(uid: int) -> int:
    """Threads of all processes of the user that are in view."""
    count = 0
    for name in os.listdir("/proc"):
        with contextlib.suppress(OSError):
            if name.isdigit() and os.stat(f"/proc/{name}").st_uid == uid:
                count += len(os.listdir(f"/proc/{name}/task"))
    return count


def _children(pid: int) -> list[int]:
    found: list[int] = []
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return found
    for thread in threads:
        with (
            contextlib.suppress(OSError),
            open(f"/proc/{pid}/task/{thread}/children", encoding="utf-8") as file,
        ):
            found += [int(one) for one in file.read().split()]
    return found


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat after the name: state, parent, group, session, ..."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return []
