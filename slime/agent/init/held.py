"""Counts deleted files, sockets and pipes, which processes hold through descriptors and mappings."""

from __future__ import annotations

import contextlib
import os
import stat
from dataclasses import dataclass, field

SOCKET_BYTES = 208 << 10
"""Largest buffer of a socket in bytes: the kernel's default. `system_calls` prevents programs from raising it."""
PIPE_BYTES = 64 << 10
_TABLES = ("tcp", "tcp6", "udp", "udp6", "icmp", "icmp6")


@dataclass
class Held:
    """Lists the holdings of a sandbox's processes. An object that several processes share counts once."""

    deleted: dict[int, int] = field(default_factory=dict)
    """The bytes per file on the folder's disk that has no name any more, by the number of the file."""
    sockets: set[int] = field(default_factory=set)
    pipes: set[int] = field(default_factory=set)
    inet: dict[int, bool] = field(default_factory=dict)
    """True for each TCP or UDP socket that holds data."""

    @property
    def deleted_bytes(self) -> int:
        return sum(self.deleted.values())

    @property
    def inet_bytes(self) -> int:
        """Returns an upper bound for the bytes in sockets of TCP and UDP."""
        return SOCKET_BYTES * sum(self.inet.values())

    @property
    def buffer_bytes(self) -> int:
        """Returns an upper bound for the bytes in all sockets and pipes. The kernel does not show the queues of Unix
        sockets and pipes."""
        others = len(self.sockets - self.inet.keys())
        return self.inet_bytes + SOCKET_BYTES * others + PIPE_BYTES * len(self.pipes)


def held(pids: list[int], folder: str, network: bool) -> Held:
    """Returns the holdings of the processes. With `network`, the network is the host's, so only sockets with a
    descriptor in these processes count."""
    device, found = os.stat(folder).st_dev, Held()
    for pid in pids:
        # Processes and descriptors may vanish meanwhile.
        with contextlib.suppress(OSError):
            for name in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    _add(os.stat(f"/proc/{pid}/fd/{name}"), device, found)
        with contextlib.suppress(OSError, ValueError):
            _add_mapped(pid, device, found.deleted)
    for table in _TABLES if pids else ():
        # All processes share one network.
        with contextlib.suppress(OSError), open(f"/proc/{pids[0]}/net/{table}", encoding="ascii") as lines:
            for words in (line.split() for line in list(lines)[1:]):
                if not network or int(words[9]) in found.sockets:
                    found.inet[int(words[9])] = words[4] != "00000000:00000000"
    return found


def _add(status: os.stat_result, device: int, found: Held) -> None:
    if stat.S_ISSOCK(status.st_mode):
        found.sockets.add(status.st_ino)
    elif stat.S_ISFIFO(status.st_mode):
        found.pipes.add(status.st_ino)
    elif status.st_nlink == 0 and status.st_dev == device:
        found.deleted[status.st_ino] = status.st_blocks * 512


def _add_mapped(pid: int, device: int, deleted: dict[int, int]) -> None:
    """Adds deleted files without a descriptor. Their sizes are not in view, so the mapped parts count."""
    with open(f"/proc/{pid}/maps", encoding="utf-8", errors="replace") as lines:
        for line in lines:
            if line.endswith(" (deleted)\n"):
                span, _, offset, device_number, inode = line.split(maxsplit=5)[:5]
                major, minor = (int(word, 16) for word in device_number.split(":"))
                if os.makedev(major, minor) == device:
                    start, end = (int(word, 16) for word in span.split("-"))
                    deleted.setdefault(int(inode), int(offset, 16) + end - start)
