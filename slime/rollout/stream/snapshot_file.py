"""The file with the unfinished groups of a run. A run that resumes takes the tokens of its groups from this file.

The first line is a header, and each further line is one group. Its samples are stored as in the buffer of a data
position. Each line is a checksum and a JSON object:

    5f2a90c1 {"group": 8, "prompts": "9c1e...", "version": 2, "samples": [...]}

A write makes a new file and replaces the old file in one step. It copies the lines of unchanged groups from the old
file, so that a group is converted to text only when it has new tokens.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, TypeAlias

from slime.types import Metadata

logger = logging.getLogger(__name__)
NAME = "unfinished.jsonl"
VERSION = 1
MOST_BYTES = 4 * 2**30
"""A file never has more bytes than this. The groups that do not fit start again after a resume."""
_SUM_DIGITS = 8
Record: TypeAlias = Metadata
"""The JSON object of a line."""


@dataclass(frozen=True)
class SnapshotHeader:
    """The first line: which run wrote the file, and how the run samples."""

    run: str
    """The id of the run, which the data position of its checkpoints has too."""
    sampling: Mapping[str, object]
    """The settings that a token's log-prob depends on."""
    rollout: int
    """The rollout that was generated."""


@dataclass(frozen=True)
class Line:
    """The offset and size of a group's line in the file, and a key that changes with the group's tokens."""

    offset: int
    size: int
    key: object = None


@dataclass
class Text:
    """The line of a changed group."""

    key: object
    line: bytes


class SnapshotFile:
    """The file of one run. `write` runs in one thread at a time; other threads may call `read` meanwhile."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._now: tuple[BinaryIO, dict[int, Line]] | None = None
        """The open file and the groups in it. They change together, in one assignment."""

    @property
    def lines(self) -> Mapping[int, Line]:
        """Returns the groups of the file."""
        return {} if self._now is None else self._now[1]

    def load(self) -> SnapshotHeader | None:
        """Reads the header and finds the groups. Returns None if there is no file, or none with a readable header. A
        damaged line is left out with a warning."""
        try:
            file = self.path.open("rb")
        except FileNotFoundError:
            return None
        found, damaged = dict[int, Line](), 0
        header, offset = _header(decode(first := file.readline())), len(first)
        for text in file if header is not None else ():
            record = decode(text)
            if record is None or not isinstance(record.get("group"), int):
                damaged += 1
            else:
                found[record["group"]] = Line(offset, len(text))
            offset += len(text)
        if header is None:
            logger.warning("%s has no readable first line, so its groups start again", self.path)
        elif damaged:
            logger.warning(
                "%s has %d damaged lines, whose groups start again; %d groups are intact",
                *(self.path, damaged, len(found)),
            )
        self._now = file, found
        return header

    def read(self, number: int) -> Record | None:
        """Returns the record of a group, or None if the file has no intact line for it."""
        return None if (text := self._read_text(number)) is None else decode(text)

    def get_key(self, number: int) -> object:
        """Returns the key with which the group was written."""
        line = self.lines.get(number)
        return None if line is None else line.key

    def write(self, header: SnapshotHeader, texts: Mapping[int, Text], same: Iterable[int]) -> int:
        """Replaces the file: the lines of `texts`, and the old lines of the groups `same`. Returns its size in bytes.

        The groups with the lowest numbers are written first, because they are needed first.
        """
        old = self.lines
        numbers = sorted({*texts, *(number for number in same if number in old)})
        scratch = self.path.with_name(f"{NAME}.{os.getpid()}.tmp")
        found: dict[int, Line] = {}
        try:
            with scratch.open("wb") as file:
                end = file.write(encode({"version": VERSION, **vars(header)}))
                for number in numbers:
                    text = texts.get(number) or Text(old[number].key, self._read_text(number) or b"")
                    if end + len(text.line) > MOST_BYTES:
                        logger.warning(
                            "%s has reached %d bytes: %d groups are not stored, and start again after a resume",
                            *(self.path, MOST_BYTES, len(numbers) - len(found)),
                        )
                        break
                    found[number] = Line(end, len(text.line), text.key)
                    end += file.write(text.line)
                file.flush()
                os.fsync(file.fileno())
            opened = scratch.open("rb")
            os.replace(scratch, self.path)
        except BaseException:
            scratch.unlink(missing_ok=True)
            raise
        self._now = opened, found
        return end

    def copy(self, to: Path) -> SnapshotFile:
        """Returns a copy of the file at `to`, which is replaced in one step."""
        scratch = to.with_name(f"{NAME}.{os.getpid()}.tmp")
        shutil.copyfile(self.path, scratch)
        os.replace(scratch, to)
        copied = SnapshotFile(to)
        copied.load()
        return copied

    def remove(self) -> None:
        """Removes the file."""
        self._now = None
        self.path.unlink(missing_ok=True)

    def _read_text(self, number: int) -> bytes | None:
        """Returns the bytes of a group's line."""
        if (now := self._now) is None or number not in now[1]:
            return None
        line = now[1][number]
        return os.pread(now[0].fileno(), line.size, line.offset)


def encode(record: Mapping[str, object]) -> bytes:
    """Returns the line of a record. Raises ValueError for a value that is not plain."""
    return join([json.dumps(record, default=_refuse)])


def join(parts: Iterable[str]) -> bytes:
    """Returns the line of a record whose JSON text is given in parts."""
    text = "".join(parts).encode()
    return b"%08x " % zlib.crc32(text) + text + b"\n"


def sample_text(sample: Mapping[str, object]) -> str:
    """Returns the JSON text of a sample's plain values. Raises ValueError for a value that is not plain."""
    return json.dumps(sample, default=_refuse)


def decode(line: bytes) -> Record | None:
    """Returns the record of a line, or None for a damaged line."""
    digits, text = line[:_SUM_DIGITS], line[_SUM_DIGITS + 1 :].removesuffix(b"\n")
    if not line.endswith(b"\n") or digits != b"%08x" % zlib.crc32(text):
        return None
    record = json.loads(text)
    return record if isinstance(record, dict) else None


def _header(record: Record | None) -> SnapshotHeader | None:
    """Returns the header, or None for a line that is no header of this version."""
    if (
        record is None
        or record.get("version") != VERSION
        or not {"run", "sampling", "rollout"} <= record.keys()
    ):
        return None
    return SnapshotHeader(record["run"], record["sampling"], record["rollout"])


def _refuse(value: object) -> object:
    raise ValueError(
        f"a sample must have plain values to be stored, got {type(value).__name__}; convert it in the hook"
    )
