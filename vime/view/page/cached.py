"""Caches values that are read from the files of a run until the files change."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Generic, TypeVar

T = TypeVar("T")
_SHARE = 0.1
"""Maximum share of time that may be spent on reading a value repeatedly while a run writes."""

Stamp = tuple[tuple[str, int, int, int], ...]


def stamp(paths: Iterable[Path]) -> Stamp:
    """Returns a tuple that changes when one of the files changes. Missing files are left out."""
    found = []
    for path in paths:
        try:
            status = path.stat()
        except OSError:
            continue  # reading the file gives the reason
        found.append((path.name, status.st_ino, status.st_size, status.st_mtime_ns))
    return tuple(found)


class CachedValue(Generic[T]):
    """A value that is read at the first `get`, and again when the result of `changes()` differs.

    A value that takes long to read is kept longer, so that reading takes at most a tenth of the time.
    """

    def __init__(self, read: Callable[[], T], changes: Callable[[], object]) -> None:
        self._read, self._changes = read, changes
        self._value: T | None = None
        self._stamp: object = None
        self._until = 0.0

    def get(self) -> T:
        """Returns the value. Errors of reading are raised, and the next call reads again."""
        if self._value is not None and time.monotonic() < self._until:
            return self._value
        now = self._changes()
        if self._value is None or now != self._stamp:
            began = time.monotonic()
            self._value, self._stamp = self._read(), now
            ended = time.monotonic()
            self._until = ended + (ended - began) / _SHARE
        return self._value


def to_json(value: object) -> str:
    """Encodes JSON that browsers can read: a number that is not finite becomes null."""
    try:
        return json.dumps(value, allow_nan=False, separators=(",", ":"), default=str)
    except ValueError:
        return json.dumps(_finite(value), allow_nan=False, separators=(",", ":"), default=str)


def _finite(value: object) -> object:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
