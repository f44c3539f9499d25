"""One run per directory: a lock on --run-dir and on --save that the kernel releases when the run's process ends.

A second run would replace the first run's metrics, and remove or overwrite its weights and checkpoints.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from contextlib import ExitStack
from pathlib import Path

LOCK_FILE = ".vime-lock"


def lock(flag: str, directory: str | Path, stack: ExitStack) -> None:
    """Make the directory and hold its lock until `stack` ends.

    ValueError if another run holds the lock, or if the directory cannot be written or locked.
    """
    path = Path(directory)
    try:
        path.mkdir(parents=True, exist_ok=True)
        # Not inherited by the processes that a run starts (O_CLOEXEC), so the lock ends with the driver.
        file = stack.enter_context((path / LOCK_FILE).open("a+", encoding="utf-8"))
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ValueError(
            f"{flag} must not be in use by another run, got {path}, which is in use by {_owner(path / LOCK_FILE)}; "
            "end that run or name another directory"
        ) from None
    except OSError as error:
        raise ValueError(
            f"{flag} must be a directory that this user can write to and lock, got {path}: {error.strerror}; "
            "name another one"
        ) from error
    file.truncate(0)
    json.dump({"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%F %T")}, file)
    file.flush()


def lock_all(flags: dict[str, str | None], stack: ExitStack) -> None:
    """`lock` each directory of flag -> directory. Flags may name the same directory."""
    seen: set[Path] = set()
    for flag, directory in flags.items():
        if directory is not None and (path := Path(directory).resolve()) not in seen:
            seen.add(path)
            lock(flag, directory, stack)


def _owner(file: Path) -> str:
    try:
        owner = json.loads(file.read_text(encoding="utf-8"))
        return f"process {owner['pid']} on {owner['host']} since {owner['since']}"
    except (OSError, ValueError, KeyError):  # the owner is writing it
        return "another process"
