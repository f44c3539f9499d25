"""The matrix product, with a tile that the shape selects. On an H200, all tiles that were tried gave the same bits for
117 shapes (benchmarks/reports/bitwise_h200.md). `rl_kernel.invariant.broken` compares the tiles on each machine."""

import functools
import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

ALIGNMENT = 16
"""Alignment in bytes: rows that a GPU copies by tiles start at multiples of this number."""


class Tile(NamedTuple):
    """Size of a part of the result, and the amount of K that a program reads at a time. If `persistent`, each processor
    runs one program, which computes several parts and reads for the next part while it writes the last. If `halves`, a
    part is written in two steps, so that more shared memory is free to read ahead."""

    rows: int
    columns: int
    inner: int
    warps: int
    stages: int
    persistent: bool = False
    halves: bool = False


_16x32 = Tile(16, 32, 256, 4, 3)
_64x16 = Tile(64, 16, 256, 4, 4)
_64x32 = Tile(64, 32, 128, 4, 6)
_64x64 = Tile(64, 64, 128, 4, 6)
_64x128 = Tile(64, 128, 128, 4, 4, persistent=True, halves=True)
_64x256 = Tile(64, 256, 64, 4, 5, persistent=True, halves=True)
_128x128 = Tile(128, 128, 64, 4, 6, persistent=True, halves=True)
_128x256 = Tile(128, 256, 64, 8, 4, persistent=True, halves=True)
TIMES: dict[int, dict[Tile, float]] = {
    32: {_16x32: 1.92, _64x256: 5.94},
    64: {_64x16: 1.92, _64x32: 2.61, _64x64: 2.64, _64x256: 6.04},
    256: {_64x16: 2.03, _64x64: 2.94, _64x128: 3.78, _128x128: 5.84, _64x256: 6.42, _128x256: 11.12},
    2**31: {_64x64: 3.03, _64x128: 3.5, _128x128: 5.6, _128x256: 10.85},
}
"""Largest number of rows of a product -> tile -> time of a part, in nanoseconds per element of K. Only
the times' ratios matter: they select the tile. From 65 rows on, they are near the medians of nine products on two H200s
(`tiles_in_halves` of benchmarks/results/bitwise_h200.json). Up to 64 rows they come from an earlier fit, and a tile
that later got more stages kept its time. On another GPU other tiles may be faster, with the same bits."""
TILES = tuple(dict.fromkeys(tile for times in TIMES.values() for tile in times))
SHARED_BYTES = 227 * 1024
"""Bytes of shared memory per program on Hopper GPUs, for the data that it reads ahead and the part of the result
that it writes."""
GROUP = 16
"""Number of tiles of rows that are computed before the next columns, so that the weight's tiles stay in the cache."""


@functools.lru_cache(1024)
def choose_tile(rows: int, outputs: int, processors: int, itemsize: int = 2) -> Tile:
    """Returns the tile that computes a result [rows, outputs], of elements of `itemsize` bytes, in the shortest
    time."""
    times = next(times for most, times in TIMES.items() if rows <= most)
    fitting = [tile for tile in times if _shared_bytes(tile, itemsize) <= SHARED_BYTES]
    return min(fitting, key=lambda tile: times[tile] * math.ceil(_parts(tile, rows, outputs) / processors))


def _shared_bytes(tile: Tile, itemsize: int) -> int:
    """Returns the shared memory of a tile in bytes, for factors of 16 bits."""
    ahead = tile.stages * (tile.rows + tile.columns) * tile.inner * 2
    return ahead + tile.rows * _written(tile) * itemsize


def _written(tile: Tile) -> int:
    """Returns the number of columns that are written at a time."""
    return tile.columns // 2 if tile.halves else tile.columns


@triton.jit(do_not_specialize=["M"])  # a new number of rows does not compile the kernel again
def linear_kernel(
    X, W, BIAS, OUT, M, N, K,
    HAS_BIAS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr, GROUP: tl.constexpr,
    PROGRAMS: tl.constexpr, PERSISTENT: tl.constexpr, HALVES: tl.constexpr,
):  # fmt: skip
    """Computes tiles of X @ W.T + BIAS, with float32 sums over K from first to last."""
    tall, broad = tl.cdiv(M, ROWS), tl.cdiv(N, COLUMNS)
    step = PROGRAMS if PERSISTENT else tall * broad
    for part in tl.range(tl.program_id(0), tall * broad, step, flatten=PERSISTENT):
        group = part // (GROUP * broad)
        height = min(tall - group * GROUP, GROUP)
        row = (group * GROUP + part % (GROUP * broad) % height) * ROWS
        column = (part % (GROUP * broad) // height) * COLUMNS
        total = tl.zeros((ROWS, COLUMNS), tl.float32)
        for first in range(0, K, INNER):
            total = tl.dot(X.load([row, first]), W.load([column, first]).T, total)
        if HAS_BIAS:
            lane = column + tl.arange(0, COLUMNS)
            total += tl.load(BIAS + lane, lane < N, other=0.0).to(tl.float32)[None, :]
        if HALVES:
            left, right = tl.split(total.reshape(ROWS, 2, COLUMNS // 2).permute(0, 2, 1))
            OUT.store([row, column], left.to(OUT.dtype))
            OUT.store([row, column + COLUMNS // 2], right.to(OUT.dtype))
        else:
            OUT.store([row, column], total.to(OUT.dtype))


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    tile: Tile | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Computes x [M, K] and weight [N, K] -> [M, N] in `dtype` (default: the dtype of x). The result's rows start at
    multiples of 16 bytes.

    Copies x or the weight if its rows do not start at such multiples. `tile` replaces the fastest tile; the bits are
    the same.
    """
    x, weight = aligned(x), aligned(weight)
    (rows, inner), outputs = x.shape, len(weight)
    dtype = x.dtype if dtype is None else dtype
    out = x.new_empty(rows, _whole(outputs, dtype), dtype=dtype)[:, :outputs]
    if out.numel():
        processors = count_processors(x.device)
        tile = tile or choose_tile(rows, outputs, processors, dtype.itemsize)
        parts = _parts(tile, rows, outputs)
        with torch.cuda.device_of(x):
            linear_kernel[(min(parts, processors) if tile.persistent else parts,)](
                TensorDescriptor.from_tensor(x, [tile.rows, tile.inner]),
                TensorDescriptor.from_tensor(weight, [tile.columns, tile.inner]),
                weight if bias is None else bias,
                TensorDescriptor.from_tensor(out, [tile.rows, _written(tile)]),
                rows, outputs, inner,
                HAS_BIAS=bias is not None, ROWS=tile.rows, COLUMNS=tile.columns, INNER=tile.inner, GROUP=GROUP,
                PROGRAMS=processors, PERSISTENT=tile.persistent, HALVES=tile.halves,
                num_warps=tile.warps, num_stages=tile.stages,
            )  # fmt: skip
    return out


@functools.cache
def count_processors(device: torch.device) -> int:
    """Returns the number of processors. It is 1 on a host, where Triton's interpreter runs one program after
    another."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def _parts(tile: Tile, rows: int, outputs: int) -> int:
    return -(-rows // tile.rows) * -(-outputs // tile.columns)


def _whole(elements: int, dtype: torch.dtype) -> int:
    """Rounds `elements` up to a number that fills whole units of ALIGNMENT."""
    unit = ALIGNMENT // dtype.itemsize
    return -(-elements // unit) * unit


def aligned(x: Tensor) -> Tensor:
    """Returns `x` if its rows are contiguous and start at multiples of ALIGNMENT, otherwise a copy."""
    starts_aligned = x.data_ptr() % ALIGNMENT == x.stride(0) * x.itemsize % ALIGNMENT == 0
    if starts_aligned and x.stride(1) == 1 and x.stride(0) >= x.shape[1]:
        return x
    copy = x.new_empty(len(x), _whole(x.shape[1], x.dtype))[:, : x.shape[1]]
    return copy.copy_(x)
