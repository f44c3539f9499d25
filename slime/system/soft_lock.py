"""Locks for file systems without flock, such as Lustre without its mount option. Only one process can create the lock
file.

The file contains the process and its host (filelock's SoftFileLock). If that process ran on this host and has ended,
the lock is taken over. The state of a process on another host is unknown, so a person must decide.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import tempfile
from pathlib import Path

MISSING = {errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK}
"""The error numbers of flock on a file system without flock."""


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
