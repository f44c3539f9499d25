"""A safetensors file that all trainer ranks write together. Each rank writes its own slices at their offsets.

So the file holds whole tensors, any engine can read it, and no rank holds more than its slices. A rank writes exactly
the bytes of its slices with pwrite. Ranks on different hosts may share a page of the file, and with mapped memory a
host would also write the other host's part of the page.
"""

from __future__ import annotations

import errno
import json
import os
import socket
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch

from slime.weight_sync.slices import Slice, SlicePosition

_DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}
"""torch's name of a dtype -> the name in the safetensors format."""


class SlicedFile:
    """The file at `path`. `positions` are all ranks' slices; every rank computes the same header from them."""

    def __init__(self, path: Path, positions: Iterable[SlicePosition]) -> None:
        self.path = path
        whole = {position.name: position for position in positions}
        # larger values come first, so that each tensor begins at a multiple of its value's size
        entries: dict[str, object] = {}
        self._first: dict[str, int] = {}
        self.weights_bytes = 0
        for name in sorted(whole, key=lambda name: (-whole[name].itemsize, name)):
            position = whole[name]
            end = self.weights_bytes + position.whole_bytes
            self._first[name] = self.weights_bytes
            entries[name] = {
                "dtype": _DTYPES[position.dtype],
                "shape": list(position.shape),
                "data_offsets": [self.weights_bytes, end],
            }
            self.weights_bytes = end
        header = json.dumps(entries, separators=(",", ":")).encode()
        header += b" " * (-len(header) % 8)
        self._header = len(header).to_bytes(8, "little") + header

    @property
    def nbytes(self) -> int:
        return len(self._header) + self.weights_bytes

    def create(self) -> None:
        """Creates the file with its header and its full length. One rank calls this before all ranks write."""
        with self.path.open("wb") as file:
            file.write(self._header)
            file.truncate(self.nbytes)

    def write(self, slices: Sequence[Slice]) -> Iterator[tuple[SlicePosition, np.ndarray]]:
        """Writes slices into the file. Yields the bytes of a slice after it is written."""
        try:
            file = os.open(self.path, os.O_WRONLY)
        except FileNotFoundError as error:
            raise ValueError(
                f"--weight-dir must be a folder that the hosts of all trainer ranks see, got no {self.path} on "
                f"{socket.gethostname()}; name a shared folder"
            ) from error
        try:
            for each in slices:
                data = octets(each.values())
                _write(file, len(self._header) + self._first[each.position.name], each.position, data)
                yield each.position, data
        finally:
            os.close(file)  # on a network disk, a full disk is an error here


def octets(tensor: torch.Tensor) -> np.ndarray:
    """Returns the bytes of a tensor in row-major order, on the host."""
    found: np.ndarray = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
    return found


def _write(file: int, first: int, position: SlicePosition, data: np.ndarray) -> None:
    """Writes the bytes of a slice. Its tensor begins at byte `first` of the file."""
    length, runs = position.runs()
    view = data.data
    for number, run in enumerate(runs):
        left, at = view[number * length : (number + 1) * length], first + run
        while left.nbytes:  # Linux writes 2 GiB at most in one call
            written = os.pwrite(file, left, at)
            if not written:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            left, at = left[written:], at + written
