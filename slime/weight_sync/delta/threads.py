"""Thread pools for deltas: several tensors (on a trainer rank: slices) run at the same time, and several pieces per
tensor. numpy, zlib and checksums release the interpreter lock.

There are two pools, because a tensor's thread waits for its pieces.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from functools import cache

TENSORS = 4
"""Number of tensors that are processed at the same time. Each has a buffer in host memory if weights are on a GPU."""


@cache
def for_tensors() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(TENSORS, thread_name_prefix="delta-tensor")


@cache
def for_pieces() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(16, os.cpu_count() or 1), thread_name_prefix="delta-piece")
