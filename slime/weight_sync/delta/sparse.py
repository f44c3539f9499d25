"""Positions and words of the values that changed, compressed.

A tensor is cut into pieces of PIECE values, and each piece is one record:

    count, width, size         4 bytes each: values that changed, bytes of a distance, bytes that follow
    distances, words           each in planes (all lowest bytes, then all second bytes, ...), zlib

A distance is the difference between the positions of two changed values. The upper planes are almost all zero. zlib is
in Python's standard library, so trainer and engine host need no package for it.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from types import ModuleType

import numpy as np

from slime.weight_sync.delta.threads import for_pieces

PIECE = 1 << 20
"""Number of values in a piece. It bounds the memory of positions, and several pieces are packed at the same time."""
_HEAD = struct.Struct("<3I")
_LEVEL = 1


def pack(old: np.ndarray, new: np.ndarray, encoding: ModuleType) -> tuple[bytes, int]:
    """Returns the difference of two arrays of equally large words, and the number of words that differ."""
    starts = range(0, old.size, PIECE)
    packed = list(
        for_pieces().map(lambda at: _pack(old[at : at + PIECE], new[at : at + PIECE], encoding), starts)
    )
    changed = sum(count for _, count in packed)
    return b"".join(data for data, _ in packed) if changed else b"", changed


def _pack(old: np.ndarray, new: np.ndarray, encoding: ModuleType) -> tuple[bytes, int]:
    positions = np.flatnonzero(old != new)
    distances = np.diff(positions, prepend=0)
    largest = int(distances.max(initial=0))
    width = 1 if largest < 1 << 8 else 2 if largest < 1 << 16 else 4
    words = encoding.values(old.take(positions), new.take(positions))
    raw = _planes(distances.astype(f"<u{width}")) + _planes(words)
    data = zlib.compress(raw, _LEVEL) if positions.size else b""
    return _HEAD.pack(positions.size, width, len(data)) + data, positions.size


def apply(words: np.ndarray, packed: bytes, encoding: ModuleType) -> None:
    """Changes `words` in place with the records in `packed`. Raises ValueError for a record that cannot be read."""
    if not packed:
        return
    pieces = [words[at : at + PIECE] for at in range(0, words.size, PIECE)]
    records = list(_records(packed))
    if len(records) != len(pieces):
        raise ValueError(f"{len(pieces)} pieces must come, got {len(records)}")
    list(for_pieces().map(lambda piece, record: _apply(piece, record, encoding), pieces, records))


def _records(packed: bytes) -> Iterator[tuple[int, int, bytes]]:
    at = 0
    while at < len(packed):
        if len(packed) - at < _HEAD.size:
            raise ValueError("a record must be whole, got a part of one")
        count, width, size = _HEAD.unpack_from(packed, at)
        at += _HEAD.size
        yield count, width, packed[at : at + size]
        at += size


def _apply(piece: np.ndarray, record: tuple[int, int, bytes], encoding: ModuleType) -> None:
    count, width, data = record
    if not count:
        return
    if width not in (1, 2, 4) or count > piece.size:
        raise ValueError(f"at most {piece.size} values must change, got {count} of width {width}")
    wanted, unpacked = count * (width + piece.itemsize), zlib.decompressobj()
    try:
        raw = unpacked.decompress(data, wanted + 1)  # bounded, because a small record may unpack to any size
    except zlib.error as error:
        raise ValueError(f"a record must be zlib data, got {error}") from error
    if len(raw) != wanted or not unpacked.eof:
        raise ValueError(f"{count} values must come with their positions, got {len(raw)} bytes of them")
    distances, words = raw[: count * width], raw[count * width :]
    positions = np.cumsum(_from_planes(distances, np.dtype(f"<u{width}")), dtype=np.int64)
    if positions[-1] >= piece.size:
        raise ValueError(f"positions must be below {piece.size}, got {positions[-1]}")
    piece[positions] = encoding.applied(piece[positions], _from_planes(words, piece.dtype))


def _planes(values: np.ndarray) -> bytes:
    return (
        np.ascontiguousarray(values.view(np.uint8).reshape(values.size, -1).T).tobytes()
        if values.size
        else b""
    )


def _from_planes(data: bytes, dtype: np.dtype) -> np.ndarray:
    planes = np.frombuffer(data, np.uint8).reshape(dtype.itemsize, -1)
    return np.ascontiguousarray(planes.T).reshape(-1).view(dtype)
