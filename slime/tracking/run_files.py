"""Reads the files of a run directory. Every reader of a run opens files here: `vime ui`, `doctor`, `trace`, `compare`,
`plot`, `watch`, `engines`, `bench`, and a run that resumes.

Programs of a model, and other users of a shared folder, may change a run directory at any time. So a file must be
inside the directory, also behind its links, must be a regular file, and must not be larger than a limit. Opening a file
never waits for a writer. A file that breaks a rule raises ValueError with its name.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias, TypeGuard

Line: TypeAlias = dict[str, Any]
"""One line of a file, as a JSON object."""
MOST_BYTES = 2**30
"""Maximum size of a file in bytes."""
MOST_OF_OBJECT = 2**26
"""Maximum size in bytes of a file that is one JSON object."""
MOST_OF_LINE = 2**24
MOST_DEEP = 64
"""Maximum depth of nested objects and lists."""
_GONE = (errno.ENOENT, errno.ENOTDIR)


def open_file(run_dir: Path, name: str, most_bytes: int = MOST_BYTES) -> BinaryIO | None:
    """Opens a file of a run directory by its name. Returns None if the file does not exist."""
    path = Path(run_dir) / name
    try:
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except PermissionError as error:
        raise _not_readable(path) from error
    except OSError as error:
        if error.errno in _GONE:
            return None
        raise ValueError(
            f"the files of a run must be readable, got {error.strerror} for {path}; replace the file"
        ) from error
    try:
        _check(Path(run_dir), path, file, most_bytes)
        return os.fdopen(file, "rb")
    except BaseException:
        os.close(file)
        raise


def _check(run_dir: Path, path: Path, file: int, most_bytes: int) -> None:
    """Checks the open file. The path is not checked, because another process may change it in between."""
    status = os.fstat(file)
    target = Path(os.readlink(f"/proc/self/fd/{file}"))
    if stat.S_ISREG(status.st_mode) and not target.is_relative_to(run_dir.resolve()):
        raise ValueError(
            f"the files of a run must be in its directory, got {path}, a link to {target}; copy the file there"
        )
    if not stat.S_ISREG(status.st_mode):
        raise ValueError(f"the files of a run must be regular files, got {path}, which is none; move it away")
    if status.st_size > most_bytes:
        raise ValueError(
            f"the files of a run must have at most {most_bytes} bytes, got {status.st_size} in {path}; move it away"
        )


def _not_readable(path: Path | str) -> ValueError:
    return ValueError(
        f"RUN_DIR must be a run that this user can read, got no permission for {path}; ask its owner, or read it as "
        "its user"
    )


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Raises ValueError in this context when access to a run directory is denied."""
    try:
        yield
    except PermissionError as error:
        raise _not_readable(error.filename or path) from error


def is_there(run_dir: Path, name: str) -> bool:
    """Returns True if the run directory has a file with that name, of any type, including a broken link."""
    with readable(path := Path(run_dir) / name):
        try:
            path.lstat()
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True


def read_lines(file: BinaryIO, most_bytes: int = MOST_BYTES) -> Iterator[bytes]:
    """Yields the lines of an open file, with their ends. A line of more than MOST_OF_LINE bytes is cut, and its rest is
    left out."""
    left = most_bytes
    while left > 0 and (line := file.readline(MOST_OF_LINE)):
        left -= len(line)
        if len(line) == MOST_OF_LINE and not line.endswith(b"\n"):
            while left > 0 and (rest := file.readline(MOST_OF_LINE)):
                left -= len(rest)
                if rest.endswith(b"\n"):
                    line += b"\n"
                    break
        yield line


def parse(line: bytes) -> Line | None:
    """Parses a line that is one JSON object of at most MOST_DEEP levels. Returns None for another line."""
    try:
        text = line.decode("utf-8")
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict) or (text.count("{") + text.count("[") > MOST_DEEP and _is_deep(found)):
        return None
    return found


def _is_deep(value: object) -> bool:
    level = [value]
    for _ in range(MOST_DEEP):
        inner: list[object] = []
        for one in level:
            inner += one.values() if isinstance(one, dict) else one if isinstance(one, list) else ()
        if not inner:
            return False
        level = inner
    return True


def read_object(run_dir: Path, name: str) -> Line:
    """Returns the JSON object in a file of a run directory, or an empty one if the file does not exist."""
    file = open_file(run_dir, name, MOST_OF_OBJECT)
    if file is None:
        return {}
    with file:
        content = file.read(MOST_OF_OBJECT)
    if (found := parse(content)) is None:
        raise ValueError(
            f"{Path(run_dir) / name} must be a JSON object of at most {MOST_DEEP} levels, got {content[:80]!r}; move "
            "the file away"
        )
    return found


def is_whole_number(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**53


def is_number(value: object) -> TypeGuard[float]:
    """Returns True for a number that is finite and not too large for a float."""
    return (
        isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300
    )  # False for NaN
