"""Allows one run per directory: locks --run-dir and --save until the run's process ends, when the kernel releases the
lock.

A second run would replace the first run's metrics, and remove or overwrite its weights and checkpoints. On a file
system without flock, the lock is a file, which remains after a run is killed (see slime.system.soft_lock).
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

from slime.config import Config
from slime.records.errors import FlagError
from slime.roles import get_roles
from slime.rollout.straw.flags import STRAW
from slime.rollout.straw.folder import folder_for
from slime.system.soft_lock import MISSING, holder

LOCK_FILE = ".vime-lock"
HELD_FILE = ".vime-lock-held"
"""Name of the file that exists while a run uses the directory, on a file system without flock."""
_LOOK_S = 3.0


def lock(flag: str, directory: str | Path, stack: ExitStack) -> None:
    """Makes the directory and holds its lock until `stack` ends.

    Raises ValueError if another run holds the lock, or if the directory cannot be written or locked.
    """
    path = Path(directory)
    try:
        path.mkdir(parents=True, exist_ok=True)
        # The processes that a run starts do not inherit the file (O_CLOEXEC), so the lock ends with the driver.
        file = stack.enter_context((path / LOCK_FILE).open("a+", encoding="utf-8"))
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise _in_use(flag, path) from None
    except OSError as error:
        if error.errno in MISSING:
            _lock_by_file(flag, path, stack)
            return
        raise _not_writable(flag, path, error) from error
    file.truncate(0)
    json.dump({"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%F %T")}, file)
    file.flush()


def require_free(flag: str, directory: str | Path) -> None:
    """Raises the error that `lock` would raise now, without making the directory or keeping its lock."""
    path = Path(directory)
    try:
        _require_writable(path)
        if (path / LOCK_FILE).exists():
            with (path / LOCK_FILE).open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        raise _in_use(flag, path) from None
    except OSError as error:
        if error.errno not in MISSING:
            raise _not_writable(flag, path, error) from error


def _require_writable(path: Path) -> None:
    """Raises OSError if the folder or a file in the folder cannot be created."""
    if path.exists() and not path.is_dir():
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
    folder = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
    if not folder.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
    with tempfile.TemporaryFile(dir=folder):  # the kernel may refuse a file to root despite the folder's mode
        pass


def _in_use(flag: str, path: Path) -> ValueError:
    return ValueError(
        f"{flag} must not be in use by another run, got {path}, which is in use by {_owner(path / LOCK_FILE)}; "
        "end that run or name another directory"
    )


def _not_writable(flag: str, path: Path, error: OSError) -> ValueError:
    return ValueError(
        f"{flag} must be a directory that this user can write to and lock, got {path}: {error.strerror}; "
        "name another one"
    )


def _lock_by_file(flag: str, path: Path, stack: ExitStack) -> None:
    from filelock import SoftFileLock, Timeout

    file = path / HELD_FILE
    lock = SoftFileLock(file, timeout=_LOOK_S)
    try:
        lock.acquire()
    except Timeout:
        owner, is_seen = holder(file)
        remedy = "end that run" if is_seen else f"end that run, remove {file} if it has ended already,"
        raise FlagError(
            flag,
            "not be in use by another run",
            f"{path}, which is in use by {owner}",
            f"{remedy} or name another directory",
        ) from None
    stack.callback(lock.release)
    print(
        f"note: {path} is on a file system without flock, so the lock of {flag} is the file {file}; a run that is "
        "killed leaves it behind",
        file=sys.stderr,
    )


def lock_all(flags: Mapping[str, str | None], stack: ExitStack) -> None:
    """Calls `lock` for each directory of flag -> directory. Flags may name the same directory."""
    seen: set[Path] = set()
    for flag, directory in flags.items():
        if directory is not None and (path := Path(directory).resolve()) not in seen:
            seen.add(path)
            lock(flag, directory, stack)


def written_folders(config: Config) -> dict[str, str | None]:
    """Maps each flag to the directory that the run writes to."""
    saved = {role.save_flag: role.saves_to(config) for role in get_roles(config) if role.trained}
    own: dict[str, str | None] = {"--run-dir": config.logging.run_dir}
    if config.rollout.rollout_data_transport != STRAW or config.rollout.rollout_data_dir is None:
        return {**own, **saved}
    folder = folder_for(config)
    if Path(config.logging.run_dir).resolve().is_relative_to(folder.hosts):
        return own  # a rollout host works for the run that has the other folders
    return {**own, **saved, "--rollout-data-dir": str(folder.path)}


def _owner(file: Path) -> str:
    try:
        owner = json.loads(file.read_text(encoding="utf-8"))
        return f"process {owner['pid']} on {owner['host']} since {owner['since']}"
    except (OSError, ValueError, KeyError):  # the owner is writing it
        return "another process"
