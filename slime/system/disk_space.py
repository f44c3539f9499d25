"""Room on disk: asks for it before something large is written, and names the folder when it is gone.

A full disk shows itself in many ways: OSError, safetensors' own error, a line of torch's C++ writer without a reason,
and a CheckpointException that holds the errors of all ranks.
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
"""In the errors of torch's C++ writer, which leave out why a write failed."""
_PROBE_BYTES = 2**20


def require_free_bytes(flag: str, directory: str | Path, needed_bytes: float, what: str) -> None:
    """ValueError unless `needed_bytes` are free where `directory` is, or will be made."""
    total, _, free = _usage(Path(directory))
    if total and free < needed_bytes:  # some network disks do not know their size
        raise FlagError(
            flag,
            f"have {_mib(needed_bytes)} of room for {what}",
            f"{_mib(free)} free in {directory}",
            f"remove files there, or name another folder with {flag}",
        )


class DiskSpaceGuard:
    """A block that writes `what` to `directory`, which `flag` names. Out of room, it ends with a ValueError."""

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
    """Bytes of the file system where `path` is, or will be made: in total, used, free."""
    return shutil.disk_usage(next(folder for folder in (path, *path.absolute().parents) if folder.exists()))


def _reason(error: BaseException, directory: Path) -> str | None:
    """What the kernel said, if a block failed for want of room."""
    unknown = False
    for one in _causes(error):
        if isinstance(one, OSError) and one.errno in FULL:
            return FULL[one.errno]
        if text := next((text for text in FULL.values() if text in str(one)), None):
            return text
        unknown |= _WITHOUT_REASON in str(one)
    return _probe(directory) if unknown else None


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """The error, the errors that led to it, and those of the ranks that a CheckpointException holds."""
    while error is not None:
        yield error
        for failed, _ in getattr(error, "failures", {}).values():
            yield from _causes(failed)
        error = error.__cause__ or error.__context__


def _probe(directory: Path) -> str | None:
    """What the kernel says when a small file is written to `directory`. None if that works."""
    try:
        with tempfile.TemporaryFile(dir=directory) as file:
            file.write(bytes(_PROBE_BYTES))
            file.flush()
    except OSError as error:
        return FULL.get(error.errno or 0)
    return None


def _mib(count: float) -> str:
    return f"{max(count, 0) / 2**20:,.0f} MiB"
