"""Memory of an optimizer in files of a local disk (--stream-optimizer-state-to-disk).

A part's main weights and moments are one file, which is mapped into memory. The kernel reads and writes its pages, and
keeps as many in memory as are free. The files have no names, so the kernel also frees them when the process ends.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from slime.system.disk_space import DiskSpaceGuard

FLAG = "--offload-train-disk-dir"
_ALIGNMENT = 64


class StateFile:
    """Main weights in float32 and two moments of `dtype`, for weights with `sizes` elements, in a new file in
    `directory`.

    The room on the disk is taken at once: a page that cannot be written later would end the process.
    """

    def __init__(self, directory: str | os.PathLike[str], sizes: Sequence[int], dtype: torch.dtype) -> None:
        dtypes = [torch.float32, dtype, dtype]
        total = sum(sizes)
        starts, size = list[int](), 0
        for each in dtypes:
            starts.append(size)
            size += -(-max(total, 1) * each.itemsize // _ALIGNMENT) * _ALIGNMENT
        folder = Path(directory)
        with DiskSpaceGuard(FLAG, folder, "the optimizer's state"):
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder) as file:
                os.posix_fallocate(file.fileno(), 0, size)
                self._pages = mmap.mmap(file.fileno(), size)
        self.main, self.first, self.second = (
            list(torch.frombuffer(self._pages, dtype=each, count=total, offset=start).split(list(sizes)))
            for each, start in zip(dtypes, starts, strict=True)
        )

    def moments(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the two moments of a weight."""
        return self.first[number], self.second[number]

    def fetch(self) -> None:
        """Lets the kernel read the pages ahead."""
        self._pages.madvise(mmap.MADV_WILLNEED)

    def release(self) -> None:
        """Takes the pages out of the process's memory. The kernel writes them to the disk and may drop them."""
        self._pages.madvise(mmap.MADV_DONTNEED)
