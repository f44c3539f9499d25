"""Host memory of the processes of a run, by role. The role of a process is the name of its log file."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import psutil

DRIVER, OTHER = "driver", "other"
_RESIDENT = re.compile(rb"^Rss(Anon|Shmem|File):\s+(\d+) kB$", re.MULTILINE)
"""Matches lines of /proc/PID/status."""


@dataclass(frozen=True)
class ProcessMemory:
    """Resident memory of a process in bytes."""

    anonymous: int = 0
    """The process's own pages: tensors, heaps, memory that was pinned in place."""
    shared: int = 0
    """Mapped shared memory, in full: Ray's object store, published weights, files in /dev/shm."""
    files: int = 0
    """Mapped files: libraries and checkpoints. The kernel takes unmodified pages back."""

    @property
    def resident(self) -> int:
        return self.anonymous + self.shared + self.files

    def __add__(self, other: ProcessMemory) -> ProcessMemory:
        return ProcessMemory(
            self.anonymous + other.anonymous, self.shared + other.shared, self.files + other.files
        )


def find_roles(logs: Path, driver: int, started: Iterable[int]) -> dict[int, str]:
    """Returns process id -> role, for the driver, for every process on this host that writes to a file of `logs`, and
    for the processes in `started`. A process of a Ray cluster that the run has joined also writes there."""
    found = dict.fromkeys(started, OTHER)
    folder = logs.resolve()
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            output = Path(os.readlink(f"/proc/{entry}/fd/1"))
        except OSError:  # the process has ended, or belongs to another user
            continue
        if output.parent == folder:
            found[int(entry)] = output.stem
    return {**found, driver: DRIVER}


def process_memory(pid: int) -> ProcessMemory | None:
    """Returns the current memory of a process, or None if it has ended. It reads counters, so it costs the process
    nothing."""
    try:
        with open(f"/proc/{pid}/status", "rb") as file:
            text = file.read()
    except OSError:
        return None
    sizes = {name: int(size) * 1024 for name, size in _RESIDENT.findall(text)}
    return ProcessMemory(sizes.get(b"Anon", 0), sizes.get(b"Shmem", 0), sizes.get(b"File", 0))


def proportional(pid: int) -> int | None:
    """Returns the proportional set size: a page that n processes share counts 1/n. Returns None if the process has
    ended. The kernel walks all pages of the process for this number, so it is read rarely."""
    try:
        size: int = psutil.Process(pid).memory_full_info().pss
    except psutil.Error:
        return None
    return size
