"""Replaces the locks that `datasets` takes in its cache. The replacement logs a wait, and its wait ends.

On a file system with flock, the kernel frees the lock of a process that has ended. On other file systems the lock is a
file (see slime.system.soft_lock). A process on another host may have left this file behind, and `datasets` would wait
for ever.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from types import TracebackType

from slime.system.soft_lock import has_flock, holder

_SAY_EVERY_S = 10.0
_LIMIT_S = 300.0
"""Longest wait in seconds for a lock file whose process runs on another host. A copy of a large data set takes
minutes."""


class CacheLock:
    """A lock with the interface of the FileLock in `datasets`. Raises ValueError for a lock file whose process may have
    ended."""

    def __init__(self, path: str) -> None:
        from datasets.utils._filelock import FileLock
        from filelock import BaseFileLock, SoftFileLock

        lock: BaseFileLock = FileLock(path, timeout=_SAY_EVERY_S)
        self._soft = not has_flock(Path(lock.lock_file).parent)
        if self._soft:
            lock = SoftFileLock(lock.lock_file, timeout=_SAY_EVERY_S)
        self._lock = lock

    def __enter__(self) -> None:
        from filelock import Timeout

        began = time.monotonic()
        while True:
            try:
                self._lock.acquire()
                return
            except Timeout:
                self._say(time.monotonic() - began)

    def _say(self, waited_s: float) -> None:
        file = self._lock.lock_file
        who, is_seen = holder(file) if self._soft else ("another process", True)
        if not is_seen and waited_s >= _LIMIT_S:
            raise ValueError(
                f"HF_DATASETS_CACHE must have no lock of a process that has ended, got {file} of {who} for "
                f"{waited_s:.0f} s, on a file system without flock; remove this file if that process has ended, or set "
                "HF_DATASETS_CACHE to a folder of this host"
            )
        print(
            f"note: waiting for {who}, which has had the lock {file} for {waited_s:.0f} s",
            file=sys.stderr,
            flush=True,
        )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lock.release()


def cache_lock(_: type) -> type[CacheLock]:
    """Returns CacheLock as the class of the lock that `datasets` takes while it builds a table."""
    return CacheLock
