"""Chooses a separate user id for each sandbox. Sandboxes then cannot access each other, and one signal to the user ends
all processes of a sandbox."""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path


def free_user() -> int | None:
    """Returns a random user id that no account has. It is random, so that sandboxes of other processes differ.

    Returns None unless this process is root, because only root may change its user, or if the user namespace has at
    most 1000 free ids.
    """
    if os.getuid() != 0:
        return None
    first, last = _unused()
    return first + secrets.randbelow(last - first) if last - first > 1000 else None


def closed_parent(folder: str | Path) -> Path | None:
    """Returns the first folder on the path from `/` to `folder` that a `free_user` may not enter. Returns None if such
    a user may enter all folders."""
    path = Path(os.path.realpath(folder))
    closed = (each for each in (*reversed(path.parents), path) if not each.stat().st_mode & stat.S_IXOTH)
    return next(closed, None)


def _unused() -> tuple[int, int]:
    """Returns (first, end) of a range of ids above all accounts. In a container with few ids it is the upper part of
    the container's range."""
    lines = Path("/proc/self/uid_map").read_text(encoding="utf-8").splitlines()
    inside, _, count = (int(word) for word in lines[-1].split())
    end = inside + count
    return (1 << 28, 1 << 30) if end > 1 << 30 else (inside + count // 4, end - 1)
