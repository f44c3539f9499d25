"""A user of its own for each sandbox, so that no two can touch each other and one signal ends all of one."""

from __future__ import annotations

import os
import secrets
from pathlib import Path


def free_user() -> int | None:
    """A number that no account has; None unless this process is root, which alone may change its user, of a user
    namespace with more than a few users.

    Random, so that sandboxes of other processes on the host have others.
    """
    if os.getuid() != 0:
        return None
    first, last = _unused()
    return first + secrets.randbelow(last - first) if last - first > 1000 else None


def _unused() -> tuple[int, int]:
    """A range far from accounts; in a container with few users, the upper part of what it has."""
    lines = Path("/proc/self/uid_map").read_text(encoding="utf-8").splitlines()
    inside, _, count = (int(word) for word in lines[-1].split())
    end = inside + count
    return (1 << 28, 1 << 30) if end > 1 << 30 else (inside + count // 4, end - 1)
