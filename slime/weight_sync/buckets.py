"""Packs tensors into flat buckets of bytes and unpacks them: the parts of an update that writes no file."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

ALIGNMENT = 256
"""Alignment in bytes. A value of any dtype may begin at a multiple of this number, and copies move whole cache
lines."""

Entry = tuple[str, str, list[int], int]
"""HF name, dtype, shape and first byte of a tensor in its bucket. JSON turns an entry into a list."""


def grouped(tensors: Iterable[tuple[str, Tensor]], limit: int) -> Iterator[list[tuple[str, Tensor]]]:
    """Yields groups of consecutive tensors: at most `limit` bytes together, or one larger tensor."""
    group: list[tuple[str, Tensor]] = []
    total = 0
    for name, tensor in tensors:
        size = aligned(tensor.nbytes)
        if group and total + size > limit:
            yield group
            group, total = [], 0
        group.append((name, tensor))
        total += size
    if group:
        yield group


def aligned(size: int) -> int:
    """Returns `size` in bytes, rounded up to a multiple of ALIGNMENT."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def compute_bucket_bytes(tensors: list[tuple[str, Tensor]]) -> int:
    """Returns the number of bytes that `fill` needs."""
    return sum(aligned(tensor.nbytes) for _, tensor in tensors)


def fill(bucket: Tensor, tensors: list[tuple[str, Tensor]]) -> list[Entry]:
    """Copies the tensors into `bucket`, which is uint8 and has at least `compute_bucket_bytes` bytes. Returns each
    tensor's entry."""
    entries: list[Entry] = []
    targets: list[Tensor] = []
    offset = 0
    for name, tensor in tensors:
        size = tensor.nbytes
        targets.append(bucket[offset : offset + size].view(tensor.dtype).view(tensor.shape))
        dtype = str(tensor.dtype).removeprefix("torch.")
        entries.append((name, dtype, list(tensor.shape), offset))
        offset += aligned(size)
    # A GPU copies hundreds of tensors with one kernel.
    torch._foreach_copy_(targets, [tensor for _, tensor in tensors])
    return entries


def views(bucket: Tensor, tensors: Iterable[Entry]) -> dict[str, Tensor]:
    """Returns the tensors of a bucket by HF name, without a copy. Raises ValueError for a tensor outside the bucket."""
    return {name: view(bucket, name, dtype, shape, first) for name, dtype, shape, first in tensors}


def view(bucket: Tensor, name: str, dtype: str, shape: list[int], first: int) -> Tensor:
    """Returns the tensor whose first byte is `first`. Raises ValueError if it is outside the bucket."""
    kind: torch.dtype = getattr(torch, dtype)
    size = math.prod(shape) * kind.itemsize
    if first < 0 or first + size > bucket.nbytes:
        raise ValueError(
            f"{name} must lie inside its bucket, got bytes {first} to {first + size} of {bucket.nbytes}"
        )
    return bucket[first : first + size].view(kind).view(shape)
