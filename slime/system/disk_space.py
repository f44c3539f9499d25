"""Checks the free disk space before a large write, and turns the errors of a full disk into one that names the folder.

A full disk causes different errors: OSError, an error of safetensors, an error without a reason from torch's C++
writer, and a CheckpointException that contains the errors of all ranks.
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

from slime.records.errors import FlagError

FULL = {code: os.strerror(code) for code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)}
_WITHOUT_REASON = "inline_container"
"""A part of the error text of torch's C++ writer, which has no reason for the failed write."""
_PROBE_BYTES = 2**20


def require_free_bytes(flag: str, directory: str | Path, needed_bytes: float, what: str) -> None:
    """Raises ValueError unless the file system of `directory` has `needed_bytes` free. `directory` need not exist."""
    total, _, free = _usage(Path(directory))
    if total and free < needed_bytes:  # Some network disks report the size 0.
        raise FlagError(
            flag,
            f"have {_mib(needed_bytes)} of room for {what}",
            f"{_mib(free)} free in {directory}",
            f"remove files there, or name another folder with {flag}",
        )


class DiskSpaceGuard:
    """Guards a block that writes `what` to `directory`, which `flag` names. If the block fails because the disk is
    full, the guard raises ValueError instead of the block's error."""

    def __init__(self, flag: str, directory: str | Path, what: str) -> None:
        self.flag, self.directory, self.what = flag, Path(directory), what

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None or (reason := _reason(error, self.directory)) is None:
            return
        _, _, free = _usage(self.directory)
        raise FlagError(
            self.flag,
            f"have room for {self.what}",
            f"'{reason}' in {self.directory} ({_mib(free)} free)",
            f"remove files there, or name another folder with {self.flag}",
        ) from error


def _usage(path: Path) -> tuple[int, int, int]:
    """Returns the total, used and free bytes of the file system that has `path`. `path` need not exist."""
    return shutil.disk_usage(next(folder for folder in (path, *path.absolute().parents) if folder.exists()))


def _reason(error: BaseException, directory: Path) -> str | None:
    """Returns the kernel's message if a full disk caused the error, otherwise None."""
    unknown = False
    for one in _causes(error):
        if isinstance(one, OSError) and one.errno in FULL:
            return FULL[one.errno]
        if text := next((text for text in FULL.values() if text in str(one)), None):
            return text
        unknown |= _WITHOUT_REASON in str(one)
    return _probe(directory) if unknown else None


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yields the error, its causes, and the ranks' errors that a CheckpointException contains."""
    while error is not None:
        yield error
        for failed, _ in getattr(error, "failures", {}).values():
            yield from _causes(failed)
        error = error.__cause__ or error.__context__


def _probe(directory: Path) -> str | None:
    """Writes a small file to `directory`. Returns the kernel's message if the disk is full, otherwise None."""
    try:
        with tempfile.TemporaryFile(dir=directory) as file:
            file.write(bytes(_PROBE_BYTES))
            file.flush()
    except OSError as error:
        return FULL.get(error.errno or 0)
    return None


def _mib(count: float) -> str:
    return f"{max(count, 0) / 2**20:,.0f} MiB"
