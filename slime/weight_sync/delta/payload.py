"""The difference of a tensor as bytes: a record for every slice, in any order.

    line of JSON (Header), then `packed_bytes` of slime.weight_sync.delta.sparse, whose positions are in the slice

A payload is a uint8 tensor under the tensor's HF name, so every channel carries it like a weight. Slices without a
change have a record, too: its checksum shows that the host still has the slice. All records together cover the whole
tensor, each value once.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields

import numpy as np
import torch
from torch import Tensor

from slime.weight_sync.delta import sparse
from slime.weight_sync.delta.registry import checksum, encoding
from slime.weight_sync.slices import SlicePosition, Where

_LARGEST_ITEM = 16
"""Largest size of a value in bytes."""


@dataclass(frozen=True)
class Header:
    """Header of a record."""

    encoding: str
    checksum: str
    """Name of a checksum."""
    digest: str
    """Checksum of the slice's bytes after the change, in row-major order."""
    itemsize: int
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    where: Where
    """Position of the slice in the tensor."""
    packed_bytes: int
    """Number of bytes that follow the header."""

    @property
    def whole_bytes(self) -> int:
        return math.prod(self.shape) * self.itemsize


def octets(tensor: Tensor) -> np.ndarray:
    """Returns the bytes of a contiguous tensor in host memory, without a copy. [nbytes] uint8."""
    found: np.ndarray = tensor.view(-1).view(torch.uint8).numpy()
    return found


def words(data: np.ndarray, itemsize: int) -> np.ndarray:
    """Returns bytes as unsigned integers with the size of the tensor's values. Sizes other than 2, 4 and 8 stay
    bytes."""
    return data.view(f"<u{itemsize}") if itemsize in (2, 4, 8) else data


def encode(
    old: np.ndarray, new: np.ndarray, position: SlicePosition, *, by: str, checked_by: str
) -> tuple[Tensor, int]:
    """Returns the record of the slice at `position`, whose bytes change from `old` to `new`, and the number of its
    bytes that belong to changed values. The uint8 arrays have the same size, in row-major order."""
    before = words(old, position.itemsize)
    packed, changed = sparse.pack(before, words(new, position.itemsize), encoding(by))
    digest = checksum(checked_by, new.data)
    header = Header(by, checked_by, digest, position.itemsize, position.shape, position.where, len(packed))
    line = json.dumps(asdict(header), separators=(",", ":")).encode() + b"\n"
    return torch.frombuffer(bytearray(line + packed), dtype=torch.uint8), changed * before.itemsize


def apply(data: np.ndarray, payload: Tensor) -> str | None:
    """Changes the bytes of a tensor in place. Returns None, or a description of the fault in the result: then `data` is
    damaged."""
    used = 0
    try:
        for header, packed in _records(octets(payload).tobytes()):
            if header.whole_bytes != data.nbytes:
                return f"{header.whole_bytes} bytes must change, got a tensor of {data.nbytes}"
            used += _change(data, header, packed)
    except (ValueError, TypeError, IndexError) as error:
        return str(error)
    return None if used == data.nbytes else f"{data.nbytes} bytes must have a record, got records of {used}"


def _records(data: bytes) -> Iterator[tuple[Header, bytes]]:
    at = 0
    while at < len(data):
        first = data.index(b"\n", at) + 1
        header = _header(data[at : first - 1])
        if not 0 <= header.packed_bytes <= len(data) - first:
            raise ValueError(f"{header.packed_bytes} bytes must follow a header, got {len(data) - first}")
        at = first + header.packed_bytes
        yield header, data[first:at]


def _header(line: bytes) -> Header:
    """Parses a header. Raises ValueError unless every field is present and has its type, so that no record requests
    memory of another size."""
    try:
        found = json.loads(line)
    except RecursionError as error:
        raise ValueError("a header must be flat, got one that is nested deeply") from error
    names = [one.name for one in fields(Header)]
    if not isinstance(found, dict) or sorted(found) != sorted(names):
        raise ValueError(f"a header must have the fields {', '.join(names)}, got {str(found)[:80]}")
    texts = [found[name] for name in ("encoding", "checksum", "digest")]
    counts = [found["itemsize"], found["packed_bytes"]]
    shape, where = found["shape"], found["where"]
    if not (
        all(isinstance(text, str) for text in texts)
        and all(map(_is_count, counts))
        and isinstance(shape, list)
        and all(map(_is_count, shape))
        and 1 <= found["itemsize"] <= _LARGEST_ITEM
        and isinstance(where, list)
        and len(where) == len(shape)
        and all(map(_is_span, where, shape))
    ):
        raise ValueError(f"a header must describe a slice of its tensor, got {str(found)[:200]}")
    return Header(**found)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**48


def _is_span(bounds: object, size: int) -> bool:
    """Returns whether `bounds` are begin and end of a part of an axis of length `size`."""
    is_pair = isinstance(bounds, list) and len(bounds) == 2 and all(map(_is_count, bounds))
    return is_pair and bounds[0] <= bounds[1] <= size  # type: ignore[index]


def _change(data: np.ndarray, header: Header, packed: bytes) -> int:
    """Changes one slice and returns its number of bytes. Raises ValueError if the result differs from the trainer's."""
    part = data.reshape(*header.shape, header.itemsize)[tuple(slice(*bounds) for bounds in header.where)]
    # a slice that is not contiguous is changed in a copy; the tensor gets the copy after the checksum matched
    values = np.ascontiguousarray(part).reshape(-1)
    sparse.apply(words(values, header.itemsize), packed, encoding(header.encoding))
    found = checksum(header.checksum, values.data)
    if found != header.digest:
        raise ValueError(f"{header.checksum} must be {header.digest}, got {found}")
    if packed and not part.flags.c_contiguous:
        part[...] = values.reshape(part.shape)
    return values.nbytes
