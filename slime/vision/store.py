"""The folder with the processed images. Each distinct image is processed once per processor, and stored under its key.

A file is complete when it has its name, because the writer renames it. Two processes that process one image at the same
time write the same content.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from slime.system.cache_folder import find_cache_folder
from slime.vision.inputs import MediaFile, MediaKind

if TYPE_CHECKING:
    from torch import Tensor

_SUFFIX = ".safetensors"
_MOST_BYTES = 256 * 2**30
"""Size of the folder of processed images above which the oldest are removed."""
_IN_USE_S = 3600.0
"""Seconds after its last use in which a file is never removed. A rollout and its training step are shorter."""


@dataclass(frozen=True)
class StoredMedia:
    """A processed image, and the text that replaces its marker in a prompt."""

    item: MediaFile
    text: str


class MediaStore:
    """Processed images in a folder of at most `most_bytes` bytes.

    The files that were not used for the longest time are removed first. A file that was used in the last hour stays,
    so the folder can be larger than the limit for a while.
    """

    def __init__(self, folder: Path, most_bytes: int) -> None:
        self.folder, self._most_bytes = folder, most_bytes
        folder.mkdir(parents=True, exist_ok=True)
        self._written = 0

    def find(self, key: str) -> StoredMedia | None:
        """Returns the processed image with this key, or None. Marks the file as used."""
        path = self._path(key)
        try:
            os.utime(path)
            return read_stored(path)
        except FileNotFoundError:
            return None

    def write(
        self,
        kind: MediaKind,
        key: str,
        tensors: Mapping[str, Tensor],
        *,
        tokens: int,
        grid: tuple[int, ...] = (),
        text: str = "",
    ) -> StoredMedia:
        """Stores the tensors of one image and returns their reference. `text` replaces its marker in a prompt."""
        from safetensors.torch import save

        path = self._path(key)
        size = sum(tensor.nbytes for tensor in tensors.values())
        item = MediaFile(kind, key, str(path), tokens, grid, size)
        whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
        # save_file would make a file that only its owner can read
        self._write_file(path, save(whole, {"media": json.dumps(asdict(item)), "text": text}))
        return StoredMedia(item, text)

    def receive(self, key: str, content: bytes) -> StoredMedia:
        """Stores the content of another store's file with this key, and returns the reference."""
        path = self._path(key)
        self._write_file(path, content)
        return read_stored(path)

    def _write_file(self, path: Path, content: bytes) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f"{path.stem}.{os.getpid()}-{threading.get_ident()}.partial")
        try:
            partial.write_bytes(content)
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
        self._written += len(content)
        if self._written > self._most_bytes // 8:
            self.trim()

    def trim(self) -> None:
        """Removes the files that were not used for the longest time until the folder has room."""
        self._written = 0
        now, found = time.time(), []
        for path in self.folder.glob(f"??/*{_SUFFIX}"):
            try:
                facts = path.stat()
            except FileNotFoundError:
                continue
            found.append((facts.st_mtime, facts.st_size, path))
        excess = sum(size for _, size, _ in found) - self._most_bytes
        for used, size, path in sorted(found):
            if excess <= 0 or now - used < _IN_USE_S:
                return
            path.unlink(missing_ok=True)
            excess -= size

    def _path(self, key: str) -> Path:
        return self.folder / key[:2] / f"{key}{_SUFFIX}"


def open_store(folder: Path | None = None) -> MediaStore:
    """Returns the store in a folder, or in this host's cache of `datasets`."""
    return MediaStore(folder or find_cache_folder() / "images" / "processed", _MOST_BYTES)


def read_stored(path: Path) -> StoredMedia:
    """Returns the reference to a file, from the file's own header."""
    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    metadata = header["__metadata__"]
    fields = json.loads(metadata["media"])
    item = MediaFile(**{**fields, "path": str(path), "grid": tuple(fields["grid"])})
    return StoredMedia(item, metadata["text"])
