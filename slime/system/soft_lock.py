"""Locks on file systems without flock, such as Lustre without its mount option: a file that one process alone can make.

The file holds the process and its host (filelock's SoftFileLock). If that process has ended on this host, the lock is
taken over. A process of another host cannot be looked at, so a person decides.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import tempfile
from pathlib import Path

MISSING = {errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK}
"""What flock answers on such a file system."""


def has_flock(folder: str | Path) -> bool:
    """Returns whether flock works for files of this folder."""
    with tempfile.TemporaryFile(dir=folder) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in MISSING:
                return False
            raise
    return True


def holder(file: str | Path) -> tuple[str, bool]:
    """Returns a text about the process that made the lock file, and whether this host can see if that process runs."""
    from filelock._identity import host_name

    with contextlib.suppress(OSError, ValueError):
        pid, host = Path(file).read_text(encoding="utf-8").splitlines()[:2]
        return f"process {int(pid)} on {host.partition('?')[0]}", host == host_name()
    return "a process that left no name", False
