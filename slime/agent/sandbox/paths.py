"""Reads and writes files in a folder while untrusted programs change it. No path may lead out of the folder.

The functions open each part of a path separately, and never follow a symbolic link. So no program can replace a folder
by a link between the check and the use.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def split_path(root: str, start: str, path: str) -> list[str]:
    """Returns the parts of a path below `root`. The path is absolute, or relative to `start`, a folder in `root`.
    Raises ValueError if the path leads out of `root`."""
    whole = path if path.startswith("/") else f"{start}/{path}"
    inside = whole.startswith(root + "/") or whole == root
    parts = [part for part in whole[len(root) :].split("/") if part not in ("", ".")]
    if not inside or ".." in parts or "\0" in path:
        raise ValueError(
            f"a path in the sandbox must lie in {root} and have no '..', got {path!r}; "
            "give it relative to the working folder"
        )
    return parts


@contextlib.contextmanager
def _parent(root: str, parts: list[str], make: int | None) -> Iterator[int]:
    """Yields the descriptor of the folder of the last part. With `make`, it creates missing folders, owned by the user
    `make` (-1: this process's user)."""
    held = os.open(root, _FOLDER)
    try:
        for part in parts[:-1]:
            if make is not None:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(part, dir_fd=held)
                    os.chown(part, make, make, dir_fd=held, follow_symlinks=False)
            following = _open(part, _FOLDER, held)
            os.close(held)
            held = following
        yield held
    finally:
        os.close(held)


def _open(name: str, flags: int, folder: int) -> int:
    try:
        return os.open(name, flags, dir_fd=folder)
    except OSError as error:
        if error.errno in (20, 40) and _is_link(name, folder):  # ENOTDIR, ELOOP
            raise ValueError(
                f"a path in the sandbox must not go through a symbolic link, got {name!r}; name its target"
            ) from None
        raise


def _is_link(name: str, folder: int) -> bool:
    return stat.S_ISLNK(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode)


def read(root: str, parts: list[str], limit: int) -> bytes:
    """Reads a file. Raises FileNotFoundError for a missing file, and ValueError if it is not a regular file or is
    larger than `limit` bytes."""
    with _parent(root, parts, None) as folder:
        # O_NONBLOCK: a pipe without a writer must not hold this process.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        with open(_open(parts[-1], flags, folder), "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise ValueError(
                    f"{'/'.join(parts)!r} of the sandbox must be a regular file, got another kind; name one"
                )
            data = file.read(limit + 1)
    if len(data) > limit:
        raise ValueError(
            f"{'/'.join(parts)!r} of the sandbox must have at most {limit} bytes; read it in pieces"
        )
    return data


def write(root: str, parts: list[str], content: str | bytes | Path, owner: int | None) -> None:
    """Writes a new file and renames it over the old one, so that a hard link to the old file is not changed."""
    user = -1 if owner is None else owner
    temporary = f".{secrets.token_hex(8)}"
    with _parent(root, parts, user) as folder:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with open(os.open(temporary, flags, 0o644, dir_fd=folder), "wb") as file:
            os.fchown(file.fileno(), user, user)
            if isinstance(content, Path):
                with content.open("rb") as source:
                    os.fchmod(file.fileno(), os.fstat(source.fileno()).st_mode & 0o777)
                    while block := source.read(1 << 20):
                        file.write(block)
            else:
                file.write(content.encode() if isinstance(content, str) else content)
        os.rename(temporary, parts[-1], src_dir_fd=folder, dst_dir_fd=folder)


def upload(root: str, parts: list[str], source: Path, owner: int | None) -> None:
    """Copies the files and folders below `source` with their modes. It skips symbolic links of the host."""
    for path in sorted(source.rglob("*")):
        if path.is_file() and not path.is_symlink():
            write(root, [*parts, *path.relative_to(source).parts], path, owner)


def download(root: str, parts: list[str], target: Path, limit: int) -> int:
    """Copies the regular files below `parts` to `target` and returns their number. Raises ValueError if their total
    size exceeds `limit` bytes."""
    left, count, todo = limit, 0, [parts]
    while todo:
        here = todo.pop()
        with _parent(root, [*here, ""], None) as folder, os.scandir(folder) as entries:
            kinds = [
                (entry.name, entry.is_dir(follow_symlinks=False), entry.is_file(follow_symlinks=False))
                for entry in entries
            ]
        for name, is_folder, is_file in kinds:
            below = [*here, name]
            if is_folder:
                todo.append(below)
            elif is_file:
                data = read(root, below, left)
                left, count = left - len(data), count + 1
                found_path = target.joinpath(*below[len(parts) :])
                found_path.parent.mkdir(parents=True, exist_ok=True)
                found_path.write_bytes(data)
    return count
