"""The processes of a sandbox: which they are, what they hold, how all of them end."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time

_SIZES = re.compile(rb"^(VmRSS|HugetlbPages|VmPTE):\s+(\d+) kB", re.MULTILINE)


def pids() -> list[int]:
    """The processes of the sandbox: all others for process 1 of its namespace, else all descendants of this process,
    which is their subreaper. A process whose parents have ended becomes its child, however often it forked."""
    if os.getpid() == 1:
        return [int(name) for name in os.listdir("/proc") if name.isdigit() and name != "1"]
    found, todo = [], [os.getpid()]
    while todo:
        children = _children(todo.pop())
        found += children
        todo += children
    return found


def kill_all(uid: int | None) -> None:
    """Ends all processes of the sandbox. `uid`: the sandbox's own user, None if it shares this process's user.

    Without a namespace all are stopped first, until no new one appears, so that none can fork while others are killed.
    """
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        if os.getpid() == 1:
            with contextlib.suppress(ProcessLookupError):
                os.kill(-1, signal.SIGKILL)
        else:
            if uid is not None:
                _kill_as_user(uid)
            seen: set[int] = set()
            while new := set(pids()) - seen:
                seen |= new
                send(new, signal.SIGSTOP)
            send(seen, signal.SIGKILL)
        reap()
        if not pids():
            return
        time.sleep(0.002)


def _kill_as_user(uid: int) -> None:
    """Kills every process of the user, which one call of that user does at once, a fork bomb included."""
    try:
        child = os.fork()
    except OSError:
        return  # The caller tries again.
    if child == 0:
        try:
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
            os.kill(-1, signal.SIGKILL)
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
