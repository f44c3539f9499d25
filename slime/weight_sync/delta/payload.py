"""The difference of one tensor as bytes: a line of JSON, then the record of slime.weight_sync.delta.sparse.

A payload is a uint8 tensor under the tensor's HF name, so every channel carries it like a weight. Tensors without a
change have a payload, too: its checksum shows that the host still has them.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

import numpy as np
import torch
from torch import Tensor

from slime.weight_sync.delta import sparse
from slime.weight_sync.delta.registry import checksum, encoding


@dataclass(frozen=True)
class Header:
    """Of one payload."""

    encoding: str
    checksum: str
    """The name of a checksum."""
    digest: str
    """That checksum of the whole tensor's bytes after the change."""
    itemsize: int
    nbytes: int
    """Of the whole tensor."""


def octets(tensor: Tensor) -> np.ndarray:
    """The bytes of a contiguous tensor in host memory, without a copy. [nbytes] uint8."""
    found: np.ndarray = tensor.view(-1).view(torch.uint8).numpy()
    return found


def words(data: np.ndarray, itemsize: int) -> np.ndarray:
    """Bytes as unsigned integers of the tensor's values; of other sizes than 2, 4 and 8 as bytes."""
    return data.view(f"<u{itemsize}") if itemsize in (2, 4, 8) else data


def encode(
    old: np.ndarray, new: np.ndarray, itemsize: int, *, by: str, checked_by: str
) -> tuple[Tensor, int]:
    """The payload of a tensor whose bytes change from `old` to `new`, and how many of its bytes are of values that
    changed. uint8 arrays of one size; `itemsize`: bytes of a value."""
    before = words(old, itemsize)
    packed, changed = sparse.pack(before, words(new, itemsize), encoding(by))
    header = Header(by, checked_by, checksum(checked_by, new.data), itemsize, new.nbytes)
    line = json.dumps(asdict(header)).encode() + b"\n"
    return torch.frombuffer(bytearray(line + packed), dtype=torch.uint8), changed * before.itemsize


def apply(data: np.ndarray, payload: Tensor) -> str | None:
    """Change the bytes of a tensor in place. None, or what is wrong with the result: then `data` is damaged."""
    line, _, packed = octets(payload).tobytes().partition(b"\n")
    try:
        header = Header(**json.loads(line))
        if header.nbytes != data.nbytes:
            return f"{header.nbytes} bytes must change, got a tensor of {data.nbytes}"
        sparse.apply(words(data, header.itemsize), packed, encoding(header.encoding))
        found = checksum(header.checksum, data.data)
    except (ValueError, TypeError) as error:
        return str(error)
    if found != header.digest:
        return f"{header.checksum} must be {header.digest}, got {found}"
    return None
