"""Files in a folder that someone else writes to at the same time: no path may lead out of it.

Each part of a path is opened by itself and never through a symbolic link, so that a link cannot be put in between the
check and its use.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def parts_of(root: str, start: str, path: str) -> list[str]:
    """The parts below `root` of a path that is absolute or relative to `start`, a folder in `root`. ValueError if it
    leads out."""
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
    """Descriptor of the folder that holds the last part. `make`: create folders, for that user (-1: this one)."""
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
    """FileNotFoundError if it is not there; ValueError if it is no regular file or larger than `limit` bytes."""
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
    """A new file in place of what was there, so that nothing is written through a hard link."""
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
    """The files and folders below `source`, with their modes. Symbolic links of the host are left out."""
    for path in sorted(source.rglob("*")):
        if path.is_file() and not path.is_symlink():
            write(root, [*parts, *path.relative_to(source).parts], path, owner)


def download(root: str, parts: list[str], target: Path, limit: int) -> int:
    """Copies regular files below `parts`; returns how many. ValueError beyond `limit` bytes in all."""
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
                place = target.joinpath(*below[len(parts) :])
                place.parent.mkdir(parents=True, exist_ok=True)
                place.write_bytes(data)
    return count
