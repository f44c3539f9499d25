"""Makes a cgroup for the memory of a sandbox's commands, where the host allows one. The kernel counts every kind of
memory there, such as socket buffers, files in memory and page tables."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import time
from pathlib import Path
from typing import Self

_PREFIX = "vime-sandbox-"
_LIMITS_V1 = ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes", "memory.kmem.tcp.limit_in_bytes")
_REMOVE_S = 2.0
_TRIES = 10


class Members:
    """The sandbox's side of a group: two open files, because a sandbox's view of the host does not have them."""

    def __init__(self, members: int, events: int) -> None:
        self._members, self._events = members, events

    def enter(self) -> None:
        """Moves the calling process, and so its later children, into the group."""
        os.write(self._members, b"0")

    def kills(self) -> int:
        """Returns the number of processes that the kernel has ended because of the limit."""
        found = re.search(rb"^oom_kill (\d+)", os.pread(self._events, 4096, 0), re.MULTILINE)
        return int(found[1]) if found else 0


class MemoryGroup:
    """The run's side of a group: makes and removes it. `descriptors` are for `Members`.

    The run's process holds a lock on the folder, so that no `_sweep` removes the group while it is empty. Processes of
    other containers respect the lock, although they do not see the run's process. The lock ends with the process.
    """

    def __init__(self, folder: str, lock: int, events: str) -> None:
        self.folder, self._lock = folder, lock
        members = os.open(f"{folder}/cgroup.procs", os.O_WRONLY)
        self.descriptors = [members, os.open(f"{folder}/{events}", os.O_RDONLY)]

    def close(self) -> None:
        """Closes the descriptors once the sandbox's process has them."""
        while self.descriptors:
            os.close(self.descriptors.pop())

    @classmethod
    def make(cls, limit: int) -> Self | None:
        """Makes a group with a limit in bytes. Returns None if the host does not allow one."""
        with contextlib.suppress(OSError):
            for version, parent in _parents():
                with contextlib.suppress(OSError):
                    return cls._make_in(parent, version, limit)
        return None

    @classmethod
    def _make_in(cls, parent: str, version: int, limit: int) -> Self:
        _sweep(parent)
        folder, lock = _make_locked(parent)
        try:
            if version == 1:
                for name in _LIMITS_V1:
                    if os.path.exists(f"{folder}/{name}"):
                        Path(folder, name).write_text(str(limit), encoding="utf-8")
                return cls(folder, lock, "memory.oom_control")
            Path(folder, "memory.max").write_text(str(limit), encoding="utf-8")
            if os.path.exists(f"{folder}/memory.swap.max"):
                Path(folder, "memory.swap.max").write_text("0", encoding="utf-8")
            return cls(folder, lock, "memory.events")
        except OSError:
            os.rmdir(folder)
            os.close(lock)
            raise

    def remove(self) -> None:
        """Removes the group. Every process in it must have ended."""
        self.close()
        end = time.monotonic() + _REMOVE_S
        while os.path.exists(self.folder) and time.monotonic() < end:
            with contextlib.suppress(OSError):
                os.rmdir(self.folder)
                break
            time.sleep(0.01)
        os.close(self._lock)


def _make_locked(parent: str) -> tuple[str, int]:
    """Makes a folder and locks it. Returns its path and the lock's descriptor. A sweep may remove the folder before the
    lock, so several names are tried."""
    for _ in range(_TRIES):
        folder = f"{parent}/{_PREFIX}{secrets.token_hex(8)}"
        os.mkdir(folder)
        lock = _lock(folder, fcntl.LOCK_SH)
        if lock is not None and os.path.exists(folder):
            return folder, lock
        if lock is not None:
            os.close(lock)
    raise FileNotFoundError(parent)


def _lock(folder: str, kind: int) -> int | None:
    """Returns a descriptor that holds the lock, None if the folder is gone or another process holds it."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def _parents() -> list[tuple[int, str]]:
    """Returns (version, folder) for each group below which a group with a limit of memory may be made, nearest first.

    The sandbox must not escape a limit, so a group above this process's own counts only if the groups between them have
    no limit.
    """
    paths = {}
    for line in Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0" or "memory" in controllers.split(","):
            paths["cgroup2" if number == "0" else "cgroup"] = path.rstrip("/")
    found = []
    for line in Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines():
        _, mount, kind, options, *_ = line.split()
        if kind == "cgroup" and "memory" in options.split(",") and "cgroup" in paths:
            found.append((1, mount + paths["cgroup"]))
        elif kind == "cgroup2" and "cgroup2" in paths:
            found += [(2, folder) for folder in _unlimited(mount, paths["cgroup2"])]
    return found


def _unlimited(mount: str, path: str) -> list[str]:
    found = []
    while True:
        folder = mount + path
        controllers = Path(folder, "cgroup.subtree_control").read_text(encoding="utf-8").split()
        if "memory" in controllers:
            found.append(folder)
        limit = Path(folder, "memory.max")
        if not path or (limit.exists() and limit.read_text(encoding="utf-8").strip() != "max"):
            return found
        path = path.rpartition("/")[0]


def _sweep(parent: str) -> None:
    """Removes the groups of sandboxes whose processes were killed."""
    for name in os.listdir(parent):
        if name.startswith(_PREFIX):
            with contextlib.suppress(OSError):
                lock = _lock(f"{parent}/{name}", fcntl.LOCK_EX)
                if lock is not None:
                    try:
                        os.rmdir(f"{parent}/{name}")
                    finally:
                        os.close(lock)
