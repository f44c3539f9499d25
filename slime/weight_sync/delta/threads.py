"""Threads for deltas: some tensors (on a trainer rank: slices) at the same time, and of each some pieces. numpy, zlib
and checksums leave the interpreter to other threads.

The two are apart, because a tensor's thread waits for its pieces.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from functools import cache

TENSORS = 4
"""So many at the same time. Each has a buffer in host memory where weights are on a GPU."""


@cache
def for_tensors() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(TENSORS, thread_name_prefix="delta-tensor")


@cache
def for_pieces() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(16, os.cpu_count() or 1), thread_name_prefix="delta-piece")
