"""The host's memory: the limit for processes, and the memory that they use.

A process is limited by the host's memory and by every cgroup above it (versions 1 and 2). The limit with the highest
use counts. Page cache of files does not count as used, because the kernel takes it back before it kills a process.
Files in /dev/shm count: they stay until somebody removes them. Ray 2.60 counts in the same way.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

RAY_THRESHOLD = 0.95
"""Share of the memory from which Ray kills workers, unless RAY_memory_usage_threshold is set."""
_UNLIMITED = 1 << 60
"""Bound above which a value means no limit: version 1 writes a number near 2**63 for it."""


@dataclass(frozen=True)
class HostMemory:
    """Memory in bytes under the tightest limit."""

    total: int
    used: int
    limit: str = "the host"
    """Source of the limit: the host, or a cgroup with its path."""

    @property
    def share(self) -> float:
        return self.used / self.total


def host_memory(root: Path = Path("/")) -> HostMemory | None:
    """Returns the memory of this host, or None without /proc/meminfo. `root` replaces `/`."""
    host = _read_host(root)
    if host is None:
        return None
    cgroups = [found for found in _read_cgroups(root) if found.total < host.total]
    return max([host, *cgroups], key=lambda found: (found.share, -found.total)) if cgroups else host


def host_total(root: Path = Path("/")) -> int | None:
    """Returns the largest number of bytes that all processes together may use, or None if it is unknown."""
    host = _read_host(root)
    return None if host is None else min([host.total, *(found.total for found in _read_cgroups(root))])


def kills(root: Path = Path("/")) -> int:
    """Returns the number of processes that the kernel has killed for memory, on this host and in every cgroup above
    this process. Only the difference of two values is meaningful, because the counts overlap."""
    counts = [row.split() for row in (_read(root / "proc/vmstat") or "").splitlines()]
    for line in (_read(root / "proc/self/cgroup") or "0::/").splitlines():
        _, controllers, path = line.split(":", 2)
        mount = root / "sys/fs/cgroup" / ("memory" if "memory" in controllers.split(",") else "")
        folder = mount / path.lstrip("/")
        for name in ("memory.events", "memory.oom_control"):
            counts += [
                row.split() for row in (_read(folder / name) or _read(mount / name) or "").splitlines()
            ]
    return max((int(row[1]) for row in counts if len(row) == 2 and row[0] == "oom_kill"), default=0)


def meminfo(root: Path = Path("/")) -> dict[str, int]:
    """Returns the bytes in /proc/meminfo by their names; empty without the file."""
    text = _read(root / "proc/meminfo")
    rows = (line.split() for line in (text or "").splitlines())
    return {row[0].rstrip(":"): int(row[1]) * 1024 for row in rows if len(row) == 3}


def _read_host(root: Path) -> HostMemory | None:
    facts = meminfo(root)
    if "MemTotal" not in facts:
        return None
    free = facts.get("MemAvailable", facts.get("MemFree", 0))
    return HostMemory(facts["MemTotal"], facts["MemTotal"] - free)


def _read_cgroups(root: Path) -> Iterator[HostMemory]:
    """Yields the memory of every cgroup with a limit, from this process's cgroup up to the root."""
    for line in (_read(root / "proc/self/cgroup") or "0::/").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            yield from _read_version(root / "sys/fs/cgroup", path, _VERSION_2)
        elif "memory" in controllers.split(","):
            yield from _read_version(root / "sys/fs/cgroup/memory", path, _VERSION_1)


@dataclass(frozen=True)
class _Files:
    """The names of a cgroup's files, and of the page-cache entries in its statistics."""

    limit: str
    used: str
    cache: tuple[str, ...]


_VERSION_2 = _Files("memory.max", "memory.current", ("inactive_file", "active_file"))
_VERSION_1 = _Files(
    "memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")
)


def _read_version(mount: Path, path: str, files: _Files) -> Iterator[HostMemory]:
    """Yields the memory of the cgroups on `path`. A container sees its own cgroup as the root, so a missing path is
    outside the container."""
    folder = mount / path.lstrip("/")
    while True:
        limit = _read(folder / files.limit)
        if limit is not None and limit.isdecimal() and 0 < int(limit) < _UNLIMITED:
            used = int(_read(folder / files.used) or 0)
            rows = (line.split() for line in (_read(folder / "memory.stat") or "").splitlines())
            cache = sum(int(row[1]) for row in rows if len(row) == 2 and row[0] in files.cache)
            shown = "/" + str(folder.relative_to(mount)).removeprefix(".")
            yield HostMemory(int(limit), max(used - cache, 0), f"the cgroup {shown}")
        if folder == mount:
            return
        folder = folder.parent


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None
