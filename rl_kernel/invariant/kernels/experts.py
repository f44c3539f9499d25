"""The choice of experts, and the products of experts, in one launch for all experts of a layer.

The host does not wait for the number of an expert's rows, so an engine can run these kernels in a CUDA graph. The sum
of an output has the order of `rl_kernel.invariant.kernels.product`. `rl_kernel.invariant.broken` compares both on each
machine.

T tokens, K experts of a token, E experts of this rank, C rows, sorted by expert, N outputs, I inputs.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from rl_kernel.invariant.kernels.product import ALIGNMENT, GROUP, Tile, aligned, count_processors

MOST_ROWS: dict[int, Tile] = {
    8: Tile(16, 32, 256, 4, 4),
    48: Tile(64, 128, 64, 4, 4),
    512: Tile(128, 128, 64, 4, 4, persistent=True),
    2**31: Tile(128, 128, 64, 8, 4, persistent=True),
}
"""Largest mean number of rows of an expert -> tile. The tiles have the same bits. Their times on an H200 are in
benchmarks/reports/bitwise_experts_h200.md."""
TILES = tuple(MOST_ROWS.values())
PAIRS = 4096
"""Number of pairs of a token and an expert that a program reads at a time."""
NUMBERS = 64
"""Number of parts that a program finds."""


def choose_tile(rows: int, experts: int) -> Tile:
    """Returns the tile for `rows` rows over all experts."""
    return next(tile for most, tile in MOST_ROWS.items() if rows <= most * experts)


@triton.jit(do_not_specialize=["LOGITS"])
def choose_kernel(LOGITS, IDS, stride, E, K: tl.constexpr, LANES: tl.constexpr):
    """Writes the K experts with the largest logits of a token, ascending. The smaller expert wins if logits are equal,
    and a logit that is not a number loses."""
    token = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, LANES)
    free = lane < E
    logits = tl.load(LOGITS + token * stride + lane, free, other=-float("inf"))
    logits = tl.where(logits == logits, logits, -float("inf"))
    for _ in range(K):
        top = tl.max(tl.where(free, logits, -float("inf")), 0)
        best = tl.min(tl.where(free & (logits == top), lane, LANES), 0)
        free = free & (lane != best)
    chosen = (lane < E) & (free == 0)
    place = tl.cumsum(chosen.to(tl.int32), 0) - 1
    tl.store(IDS + token * K + place, lane.to(IDS.dtype.element_ty), chosen)


@triton.jit(do_not_specialize=["PAIRS"])
def rows_kernel(IDS, ROWS, ENDS, PAIRS, STEP: tl.constexpr):
    """Writes the rows of one expert's pairs, if the pairs are sorted by expert and then by token, and the index after
    its last row. The first program writes -1 for negative experts."""
    expert = tl.program_id(0)
    lane = tl.arange(0, STEP)
    before = 0
    for first in range(0, PAIRS, STEP):
        ids = tl.load(IDS + first + lane, first + lane < PAIRS, other=-1)
        before += tl.sum(((ids >= 0) & (ids < expert)).to(tl.int32), 0)
    for first in range(0, PAIRS, STEP):
        ids = tl.load(IDS + first + lane, first + lane < PAIRS, other=-1)
        mine = (ids == expert).to(tl.int32)
        row = before + tl.cumsum(mine, 0) - 1
        tl.store(ROWS + first + lane, row, mine == 1)
        before += tl.sum(mine, 0)
        if expert == 0:
            tl.store(ROWS + first + lane, -1, (ids < 0) & (first + lane < PAIRS))
    tl.store(ENDS + expert, before)


@triton.jit(do_not_specialize=["MOST"])
def parts_kernel(
    ENDS, EXPERT, FIRST, STOP, COUNT, E, MOST, ROWS: tl.constexpr, LANES: tl.constexpr, STEP: tl.constexpr
):
    """Divides each expert's rows into parts of ROWS rows. Writes the expert, the first row and the end of STEP parts,
    and the number of parts."""
    lane = tl.arange(0, LANES)
    end = tl.load(ENDS + lane, lane < E, other=0)
    start = tl.load(ENDS + lane - 1, (lane > 0) & (lane < E), other=0)
    parts = tl.where(lane < E, (end - start + ROWS - 1) // ROWS, 0)
    last = tl.cumsum(parts, 0)
    number = tl.program_id(0) * STEP + tl.arange(0, STEP)
    inside = (number[:, None] < last[None, :]) & (number[:, None] >= (last - parts)[None, :])
    first = tl.sum(
        tl.where(inside, start[None, :] + (number[:, None] - (last - parts)[None, :]) * ROWS, 0), 1
    )
    here = number < MOST
    tl.store(EXPERT + number, tl.sum(tl.where(inside, lane[None, :], 0), 1), here)
    tl.store(FIRST + number, first, here)
    tl.store(STOP + number, tl.sum(tl.where(inside, end[None, :], 0), 1), here)
    if tl.program_id(0) == 0:
        tl.store(COUNT, tl.sum(parts, 0))


@triton.jit
def expert_kernel(
    X, W, OUT, EXPERT, FIRST, STOP, COUNT, N, K, out_stride,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr, GROUP: tl.constexpr, PROGRAMS: tl.constexpr,
    PERSISTENT: tl.constexpr,
):  # fmt: skip
    """Computes tiles of the products for all experts, with float32 sums over K from first to last. W [E N, K] has the
    experts' weights one after the other."""
    tall, broad = tl.load(COUNT), tl.cdiv(N, COLUMNS)
    step = PROGRAMS if PERSISTENT else tl.maximum(tall * broad, 1)
    for part in tl.range(tl.program_id(0), tall * broad, step, flatten=PERSISTENT):
        group = part // (GROUP * broad)
        height = min(tall - group * GROUP, GROUP)
        number = group * GROUP + part % (GROUP * broad) % height
        column = (part % (GROUP * broad) // height) * COLUMNS
        row, stop = tl.load(FIRST + number), tl.load(STOP + number)
        weight = tl.load(EXPERT + number) * N + column
        total = tl.zeros((ROWS, COLUMNS), tl.float32)
        for first in range(0, K, INNER):
            total = tl.dot(X.load([row, first]), W.load([weight, first]).T, total)
        # the rows after `stop` and the columns after N belong to other experts
        at, lane = row + tl.arange(0, ROWS), column + tl.arange(0, COLUMNS)
        to = OUT + at.to(tl.int64)[:, None] * out_stride + lane[None, :]
        tl.store(to, total.to(OUT.dtype.element_ty), (at < stop)[:, None] & (lane < N)[None, :])


def choose_experts(logits: Tensor, topk: int) -> Tensor:
    """Maps fp32 logits [T, E] to int64 [T, K], K <= E."""
    assert topk <= logits.shape[1], "a token has at most all experts"
    ids = torch.empty(len(logits), topk, dtype=torch.int64, device=logits.device)
    if len(logits):
        lanes = triton.next_power_of_2(logits.shape[1])
        assert logits.stride(1) == 1
        with torch.cuda.device_of(logits):
            choose_kernel[(len(logits),)](
                logits, ids, logits.stride(0), logits.shape[1], K=topk, LANES=lanes, num_warps=1
            )
    return ids


def expert_rows(ids: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """Maps integers [T, K], negative for experts of other ranks, to rows int32 [T, K] (-1 for such experts) and to the
    ends of the experts' rows, int32 [E]. The pairs are sorted by expert, then by token. A number must be below E."""
    ids = ids.contiguous()
    rows = torch.empty(ids.shape, dtype=torch.int32, device=ids.device)
    ends = torch.empty(experts, dtype=torch.int32, device=ids.device)
    with torch.cuda.device_of(ids):
        rows_kernel[(experts,)](ids, rows, ends, ids.numel(), STEP=PAIRS, num_warps=8)
    return rows, ends


def expert_products(
    x: Tensor, ends: Tensor, weights: Tensor, dtype: torch.dtype, tile: Tile | None = None
) -> Tensor:
    """Computes x [C, I], ends int32 [E] and weights [E, N, I] -> [C, N] in `dtype`. The rows from ends[-1] on are not
    defined. `tile` replaces the tile that the shape selects; the bits are the same."""
    experts, outputs, inputs = weights.shape
    x, flat = aligned(x), aligned(weights.reshape(-1, inputs))
    out = x.new_empty(len(x), outputs, dtype=dtype)
    if not out.numel():
        return out
    tile = tile or choose_tile(len(x), experts)
    most = len(x) // tile.rows + min(experts, len(x))  # each expert has at most one part that is not full
    size = -(-most // ALIGNMENT) * ALIGNMENT  # a pointer of another alignment compiles the kernels again
    expert, first, stop, count = torch.empty(4, size, dtype=torch.int32, device=x.device)
    programs = count_processors(x.device)
    grid = most * -(-outputs // tile.columns)
    with torch.cuda.device_of(x):
        parts_kernel[(-(-most // NUMBERS),)](
            ends, expert, first, stop, count, experts, most,
            ROWS=tile.rows, LANES=triton.next_power_of_2(experts), STEP=NUMBERS, num_warps=4,
        )  # fmt: skip
        expert_kernel[(min(grid, programs) if tile.persistent else grid,)](
            TensorDescriptor.from_tensor(x, [tile.rows, tile.inner]),
            TensorDescriptor.from_tensor(flat, [tile.columns, tile.inner]),
            out, expert, first, stop, count, outputs, inputs, out.stride(0),
            ROWS=tile.rows, COLUMNS=tile.columns, INNER=tile.inner, GROUP=GROUP, PROGRAMS=programs,
            PERSISTENT=tile.persistent, num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
    return out
