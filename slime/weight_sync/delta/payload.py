"""The difference of one tensor as bytes: a record for each of its slices, in any order.

    line of JSON (Header), then `packed_bytes` of slime.weight_sync.delta.sparse, whose positions are in the slice

A payload is a uint8 tensor under the tensor's HF name, so every channel carries it like a weight. Slices without a
change have a record, too: its checksum shows that the host still has them. All records together are of the whole
tensor, each value once.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass

import numpy as np
import torch
from torch import Tensor

from slime.weight_sync.delta import sparse
from slime.weight_sync.delta.registry import checksum, encoding
from slime.weight_sync.slices import Place, Where


@dataclass(frozen=True)
class Header:
    """Of one record."""

    encoding: str
    checksum: str
    """The name of a checksum."""
    digest: str
    """That checksum of the slice's bytes after the change, in row-major order."""
    itemsize: int
    shape: tuple[int, ...]
    """Of the whole tensor."""
    where: Where
    """The slice."""
    packed_bytes: int
    """Bytes that follow the header."""

    @property
    def whole_bytes(self) -> int:
        return math.prod(self.shape) * self.itemsize


def octets(tensor: Tensor) -> np.ndarray:
    """The bytes of a contiguous tensor in host memory, without a copy. [nbytes] uint8."""
    found: np.ndarray = tensor.view(-1).view(torch.uint8).numpy()
    return found


def words(data: np.ndarray, itemsize: int) -> np.ndarray:
    """Bytes as unsigned integers of the tensor's values; of other sizes than 2, 4 and 8 as bytes."""
    return data.view(f"<u{itemsize}") if itemsize in (2, 4, 8) else data


def encode(old: np.ndarray, new: np.ndarray, place: Place, *, by: str, checked_by: str) -> tuple[Tensor, int]:
    """The record of the slice at `place`, whose bytes change from `old` to `new`, and how many of its bytes are of
    values that changed. uint8 arrays of one size, in row-major order."""
    before = words(old, place.itemsize)
    packed, changed = sparse.pack(before, words(new, place.itemsize), encoding(by))
    digest = checksum(checked_by, new.data)
    header = Header(by, checked_by, digest, place.itemsize, place.shape, place.where, len(packed))
    line = json.dumps(asdict(header), separators=(",", ":")).encode() + b"\n"
    return torch.frombuffer(bytearray(line + packed), dtype=torch.uint8), changed * before.itemsize


def apply(data: np.ndarray, payload: Tensor) -> str | None:
    """Change the bytes of a tensor in place. None, or what is wrong with the result: then `data` is damaged."""
    given = 0
    try:
        for header, packed in _records(octets(payload).tobytes()):
            if header.whole_bytes != data.nbytes:
                return f"{header.whole_bytes} bytes must change, got a tensor of {data.nbytes}"
            given += _change(data, header, packed)
    except (ValueError, TypeError, IndexError) as error:
        return str(error)
    return None if given == data.nbytes else f"{data.nbytes} bytes must have a record, got records of {given}"


def _records(data: bytes) -> Iterator[tuple[Header, bytes]]:
    at = 0
    while at < len(data):
        first = data.index(b"\n", at) + 1
        header = Header(**json.loads(data[at : first - 1]))
        if not 0 <= header.packed_bytes <= len(data) - first:
            raise ValueError(f"{header.packed_bytes} bytes must follow a header, got {len(data) - first}")
        at = first + header.packed_bytes
        yield header, data[first:at]


def _change(data: np.ndarray, header: Header, packed: bytes) -> int:
    """Change one slice, and return its bytes. ValueError for a slice that is not the trainer's then."""
    part = data.reshape(*header.shape, header.itemsize)[tuple(slice(*bounds) for bounds in header.where)]
    # a slice that does not lie together is changed in a copy, and the tensor gets it when it is known to be right
    values = np.ascontiguousarray(part).reshape(-1)
    sparse.apply(words(values, header.itemsize), packed, encoding(header.encoding))
    found = checksum(header.checksum, values.data)
    if found != header.digest:
        raise ValueError(f"{header.checksum} must be {header.digest}, got {found}")
    if packed and not part.flags.c_contiguous:
        part[...] = values.reshape(part.shape)
    return values.nbytes
