"""Counts a folder's bytes and files, at any depth and with any modes. Deleted files that are still open count."""

from __future__ import annotations

import contextlib
import os
import time

from slime.agent.init.held import Held, held

_PERIOD_S, _REST = 0.2, 20


class DiskWatch:
    """Watches the disk limits. `breach(pids)` walks the folder and the descriptors of the processes, at most every 0.2
    s and with at most 1/20 of a processor's time. Time in which the walk waits for a processor does not count: on a
    busy host, the walks would become rare."""

    def __init__(self, folder: str, disk_bytes: int, files: int, network: bool) -> None:
        self.folder, self.disk_bytes, self.files, self.network = folder, disk_bytes, files, network
        self.held = Held()
        """The holdings at the last walk."""
        self._next = 0.0

    def breach(self, pids: list[int]) -> str:
        """Returns the exceeded limit, "disk" or "files", or "" within the limits."""
        now = time.monotonic()
        if now < self._next:
            return ""
        before = time.process_time()
        self.held = held(pids, self.folder, self.network)
        reason = self._walk(self.held.deleted_bytes)
        took = time.process_time() - before
        self._next = time.monotonic() + max(_PERIOD_S, _REST * took)
        return reason

    def _walk(self, deleted_bytes: int) -> str:
        if deleted_bytes > self.disk_bytes:
            return "disk"
        total, count, todo = deleted_bytes, 0, [self.folder]
        while todo:
            for size, below in _entries(todo.pop()):
                total, count = total + size, count + 1
                if below:
                    todo.append(below)
                if total > self.disk_bytes:
                    return "disk"
                # A path that is too long to look into counts as too many folders.
                if count > self.files or len(below) > 3500:
                    return "files"
        return ""


def _entries(folder: str) -> list[tuple[int, str]]:
    """Returns (bytes, path of a folder or "") for each entry of `folder`. Files may vanish during the call."""
    found: list[tuple[int, str]] = []
    with contextlib.suppress(PermissionError, FileNotFoundError):
        if not os.access(folder, os.R_OK | os.X_OK):
            os.chmod(folder, 0o700)
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                status = entry.stat(follow_symlinks=False)
                found.append(
                    (status.st_blocks * 512, entry.path if entry.is_dir(follow_symlinks=False) else "")
                )
    return found
