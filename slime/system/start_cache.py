"""Keeps results that the next start of this user can reuse, as JSON files in the folder `vime` of the user's caches.

A file that is missing, damaged or from another installation costs time and nothing else.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
import tempfile
from collections.abc import Callable, Iterable, Mapping
from hashlib import sha256
from pathlib import Path

_MOST = 1000
"""Most entries of an installation. When it has more, it begins anew."""
_MOST_INSTALLATIONS = 4
"""Most installations in a file, such as several virtual environments, or images with one home folder."""


def start_cache_folder(name: str = "") -> Path | None:
    """Makes and returns the folder `name` in $XDG_CACHE_HOME/vime, by default ~/.cache/vime.

    Returns None if this user cannot have the folder: the user id has no home, the folder cannot be written, or another
    user can write to it or to `vime`.
    """
    base = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "vime"
    if not base.is_absolute():
        return None
    try:
        for folder in (base, base / name):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            if not is_own(folder) or not os.access(folder, os.W_OK):
                return None
    except OSError:
        return None
    return base / name


def is_own(folder: Path) -> bool:
    """Returns True if `folder` is a folder of this user that no other user can write to. A link is not a folder."""
    found = folder.lstat()
    shared = stat.S_IWOTH | (0 if found.st_gid == os.getgid() else stat.S_IWGRP)
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & shared


def triton_cache_folder(environ: Mapping[str, str], home: str) -> str:
    """Returns the folder in which Triton keeps compiled kernels."""
    default = os.path.join(environ.get("TRITON_HOME") or home, ".triton", "cache")
    return environ.get("TRITON_CACHE_DIR") or default


def files_fingerprint(files: Iterable[Path]) -> str:
    """Returns a hash of the paths, sizes and modification times of files."""
    facts = [(str(file), status.st_size, status.st_mtime_ns) for file in files for status in [file.stat()]]
    return sha256(json.dumps(sorted(facts)).encode()).hexdigest()


class StartCache:
    """A dictionary in the file NAME.json.

    `fingerprint` identifies the installation that computed the values. Each installation has its values in the file. If
    `fingerprint` returns None, the dictionary stays empty and is not saved.
    """

    def __init__(self, name: str, fingerprint: Callable[[], str | None]) -> None:
        self._file, self._find_fingerprint = f"{name}.json", fingerprint
        self._fingerprint: str | None = None
        self._entries: dict[str, object] = {}
        self._changed = False

    def load(self) -> None:
        """Reads the file. Without a usable file, the dictionary is empty."""
        self._fingerprint, self._entries, self._changed = self._find_fingerprint(), {}, False
        folder = start_cache_folder()
        if folder is not None and self._fingerprint is not None:
            self._entries = self._stored(folder).get(self._fingerprint, {})

    def _stored(self, folder: Path) -> dict[str, dict[str, object]]:
        """Returns the values by installation, in the order in which the installations saved them."""
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError, AttributeError):
            found = json.loads((folder / self._file).read_text(encoding="utf-8"))["installations"]
            return {name: dict(entries) for name, entries in found.items()}
        return {}

    def get(self, key: str) -> object | None:
        return self._entries.get(key)

    def put(self, key: str, value: object) -> None:
        """Stores a value that JSON can represent. `save` writes it."""
        if len(self._entries) >= _MOST:
            self._entries.clear()
        self._entries[key], self._changed = value, True

    def save(self) -> None:
        """Replaces the file if the dictionary has new values. A folder that cannot be written is no error."""
        folder = start_cache_folder()
        if not self._changed or self._fingerprint is None or folder is None:
            return
        others = {name: kept for name, kept in self._stored(folder).items() if name != self._fingerprint}
        newest = dict([*others.items(), (self._fingerprint, self._entries)][-_MOST_INSTALLATIONS:])
        text = json.dumps({"installations": newest})
        with contextlib.suppress(OSError):
            handle, written = tempfile.mkstemp(dir=folder, prefix=self._file)
            with open(handle, "w", encoding="utf-8") as file:
                file.write(text)
            os.replace(written, folder / self._file)  # another start may read the file at this time
        self._changed = False
