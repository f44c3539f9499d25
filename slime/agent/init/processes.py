"""Finds the processes of a sandbox, measures their memory, and ends them."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time

_SIZES = re.compile(rb"^(VmRSS|HugetlbPages|VmPTE):\s+(\d+) kB", re.MULTILINE)


def pids() -> list[int]:
    """Returns the processes of the sandbox. In a namespace, where this process is 1, these are all other processes.
    Without a namespace, these are all descendants of this process. It is their subreaper, so a process whose parents
    have ended becomes its child."""
    if os.getpid() == 1:
        return [int(name) for name in os.listdir("/proc") if name.isdigit() and name != "1"]
    found, todo = [], [os.getpid()]
    while todo:
        children = _children(todo.pop())
        found += children
        todo += children
    return found


def kill_all(uid: int | None) -> None:
    """Ends all processes of the sandbox. `uid` is the sandbox's user, None if it shares the user of this process.

    Without a namespace, it first stops all processes until no new process appears. A stopped process cannot fork while
    other processes are killed.
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
    """Kills every process of the user. One call by this user kills all of its processes at once, also a fork bomb."""
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
"""Process id -> wait status, for processes that `reap` collected and `Owner` has not reported yet."""


def reap() -> None:
    """Collects the exit status of every child that has ended, so that no zombie stays."""
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


def find_processes(pids: list[int], leader: int) -> set[int]:
    """Returns the processes of a command: the leader, the processes in its session, and their descendants in `pids`."""
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


def count_user_tasks(uid: int) -> int:
    """Returns the number of threads of the user's visible processes."""
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
    """Returns the fields of /proc/PID/stat after the name: state, parent, group, session, ..."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return []
