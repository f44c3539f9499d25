"""The files of a checkpoint iteration: their sizes and checksums, and the list of complete iterations.

iter_0000010/checksums.json has the size and the CRC-32 of every other file of the iteration. A save writes it last. A
load and `vime checkpoint verify` compare the files with it. CRC-32 finds damage, not forgery, and costs little: one
core of an AMD EPYC computes 3.5 GB/s (BLAKE2b: 0.8 GB/s). The module imports neither torch nor Megatron.
"""

from __future__ import annotations

import io
import json
import re
import time
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from slime.checkpoints.checkpoint_dir import COMPLETE, LATEST, existing
from slime.records.errors import FlagError

CHECKSUMS = "checksums.json"
LOOK_S = 8.0
"""Longest time in seconds of the search for an older undamaged iteration. A run that cannot load ends within 15 s."""
WRITE_LATEST = f"the number {{}} in its {LATEST}"
"""Text of the remedy for a folder whose iteration no flag selects."""
_CHUNK_BYTES = 2**22


class FileSum(NamedTuple):
    """Size and checksum that a file must have. checksums.json stores them as a list."""

    bytes: int
    crc32: int


class SummedFile(io.FileIO):
    """A new file that is written from its start to its end. `sum` covers the bytes written so far."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, "wb")
        self.sum = FileSum(0, 0)

    def write(self, data: object) -> int:
        octets = memoryview(data).cast("B")  # type: ignore[arg-type]  # any object with bytes
        count = super().write(octets)
        self.sum = FileSum(self.sum.bytes + count, zlib.crc32(octets[:count], self.sum.crc32))
        return count


def sum_file(path: Path) -> FileSum:
    """Returns size and CRC-32 of a file. Several threads may call it at the same time, because zlib runs without
    Python's lock."""
    size = crc = 0
    buffer = memoryview(bytearray(_CHUNK_BYTES))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            size, crc = size + count, zlib.crc32(buffer[:count], crc)
    return FileSum(size, crc)


def write_sums(path: Path, known: Mapping[str, FileSum]) -> None:
    """Writes checksums.json of the iteration directory `path`. Files that are missing in `known` are read. The name of
    a file in a subfolder begins with the subfolder's name."""
    found = {str(file.relative_to(path)): file for file in sorted(path.rglob("*")) if file.is_file()}
    files = {name: known.get(name) or sum_file(file) for name, file in found.items()}
    (path / CHECKSUMS).write_text(json.dumps({"algorithm": "crc32", "files": files}), encoding="utf-8")


def read_sums(path: Path) -> dict[str, FileSum] | None:
    """Returns the content of checksums.json. Returns None for a checkpoint of an earlier version. Raises ValueError if
    the file cannot be read."""
    file = path / CHECKSUMS
    if not file.exists():
        return None
    try:
        return {
            name: FileSum(*values)
            for name, values in json.loads(file.read_text(encoding="utf-8"))["files"].items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise FlagError(file, "hold the checksums that --save wrote", f"{error!r}") from error


def damage(path: Path, sums: Mapping[str, FileSum], *, until: float | None = None) -> str | None:
    """Returns the first file under `path` that differs from `sums`: "FILE must ..., got ...". Returns None if all files
    are unchanged.

    Sizes are compared first, because they cost no time. No checksum is computed after `until`, a time of
    `time.monotonic`.
    """
    for name, saved in sums.items():
        file = path / name
        if not file.is_file():
            return f"{file} must be there as it was saved, got no such file"
        if (size := file.stat().st_size) != saved.bytes:
            return f"{file} must have {saved.bytes} bytes as it was saved, got {size}"
    for name, saved in sums.items():
        if until is not None and time.monotonic() > until:
            return None
        if (crc := sum_file(path / name).crc32) != saved.crc32:
            return f"{path / name} must have the checksum {saved.crc32:08x} as it was saved, got {crc:08x}"
    return None


def damaged_size(path: Path) -> str | None:
    """Returns the result of `damage` from names and sizes only. Returns None also for a checkpoint without
    checksums."""
    try:
        return damage(path, read_sums(path) or {}, until=0.0)
    except ValueError as error:
        return str(error)


def iterations(directory: Path) -> list[int]:
    """Returns the iterations under `directory` that were saved completely, in ascending order."""
    names = [re.fullmatch(r"\.?iter_(\d{7,})(\.old)?", path.name) for path in directory.glob("*iter_*")]
    found = {int(name[1]) for name in names if name}
    return sorted(i for i in found if (existing(directory, i) / COMPLETE).is_file())


def advice(directory: Path, damaged: int | None, choose: str) -> str:
    """Returns the remedy for a damaged iteration: the newest older undamaged iteration, and how to select it.

    `damaged` is None if the newest iteration is unknown. `choose` is the way to name an iteration, such as "--ckpt-step
    {}". The search ends after LOOK_S seconds. After that, sizes decide.
    """
    until = time.monotonic() + LOOK_S
    for number in reversed(iterations(directory)):
        if damaged is not None and number >= damaged:
            continue
        path = existing(directory, number)
        try:
            sums = read_sums(path)
        except ValueError:
            continue
        if sums is not None and damage(path, sums, until=until) is not None:
            continue
        state = "is whole"
        if sums is None:
            state = "has no checksums, but may be whole"
        elif time.monotonic() > until:
            state = "has all its files in full size"
        return f"the newest older iteration {number} {state}: take it with {choose.format(number)}"
    return f"no older iteration in {directory} is whole: restore the file from a copy, or start anew in another folder"
