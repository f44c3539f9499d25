"""Triton kernels of `linear_logp` and `linear_token_loss`: a matrix product that stores exponentials instead of logits.

The softmax gradient of a row is a multiple of its probabilities, except at the target. So the first product stores e =
exp(z - center) in bfloat16. Here z = logit / temperature, and `center` is the z of the row's target, computed before. A
later step applies the factor exp(center - lse) of a row, to the rows of `hidden` and of the result. No kernel needs to
read [N, V] values between the three matrix products.

With this center, e overflows only if the target's log-prob is below about -39 nats. A row whose sum exceeds SUM_LIMIT
sets a flag on the device. If the flag is set, further launches repeat the work with the row's maximum as center;
otherwise they do nothing. So all finite logits give correct results, and the host never waits.

Legend: C rows, H hidden, V columns of a tile, B blocks of columns. Exponents (z, center) are in units of ln 2.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from rl_kernel.dispatch import interpreted

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
FLOOR = tl.constexpr(-10000.0)  # exp2(FLOOR) is 0, and 0 * FLOOR is 0; with -inf the product would be NaN
LOWEST = tl.constexpr(-3.0e38)
SUM_LIMIT = tl.constexpr(1.0e17)
LIKELY = tl.constexpr(0.05)

BLOCK_ROWS, BLOCK_COLUMNS, BLOCK_HIDDEN, STAGES = 128, 128, 64, 3
PROGRAMS_PER_PROCESSOR = 2
"""Two programs share a multiprocessor (112 KiB of shared memory each): one computes products while the other stores
exponentials. Measured on an H200: 0.99 to 1.06 of the time of cuBLAS's product alone. One program with tiles of 128 x
256 took 1.03 to 1.12. A search for the target column needs registers and made both variants slower."""
FEW_ROWS = 2048
"""Up to this many rows, 8 consecutive row blocks read the same columns; above, 4 row blocks do. Each choice saves 2 to
5% in its range (measured)."""


@triton.jit
def _logit(LEFT, RIGHT, length, ROUND: tl.constexpr, BLOCK: tl.constexpr):
    """Returns a logit: the dot product of two rows, rounded as in the tiles; 0 if `length` is 0."""
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, length, BLOCK):
        at = start + tl.arange(0, BLOCK)
        left = tl.load(LEFT + at, mask=at < length, other=0.0).to(tl.float32)
        total += left * tl.load(RIGHT + at, mask=at < length, other=0.0).to(tl.float32)
    logit = tl.sum(total, 0)
    return logit.to(tl.bfloat16).to(tl.float32) if ROUND else logit


@triton.jit(do_not_specialize=["TARGETS", "TEMPERATURE", "CENTER"])
def _centers_kernel(
    HIDDEN, WEIGHT, TARGETS, TEMPERATURE, SCALE, CENTER, FLAG, H, stride_h, stride_w, first, real,
    PER_TOKEN: tl.constexpr, ROUND: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(TEMPERATURE + row).to(tl.float32) if PER_TOKEN else TEMPERATURE
    scale = LOG2E / temperature
    column = tl.load(TARGETS + row).to(tl.int64) - first
    length = tl.where((column >= 0) & (column < real), H, 0)
    logit = _logit(HIDDEN + row * stride_h, WEIGHT + column * stride_w, length, ROUND, BLOCK)
    tl.store(SCALE + row, scale)
    tl.store(CENTER + row, logit * scale)
    if row == 0:
        tl.store(FLAG, 0)


@triton.jit(do_not_specialize=["CENTER", "SUMS", "WEIGHTED", "C", "real"])
def _exp_product_kernel(
    hidden_desc, weight_desc, out_desc, SCALE, CENTER, SUMS, WEIGHTED, FLAG,
    C, V, H, real, height, programs,
    CONDITIONAL: tl.constexpr, STORE: tl.constexpr, STATS: tl.constexpr, ENTROPY: tl.constexpr,
    MAXIMUM: tl.constexpr, ROUND: tl.constexpr, WIDEN: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    row_blocks = tl.cdiv(C, BM)
    column_blocks = tl.cdiv(V, BN)
    steps = tl.cdiv(H, BK)
    tiles = row_blocks * column_blocks
    if CONDITIONAL:
        tiles = tiles * tl.load(FLAG)
    per_group = height * column_blocks
    # A persistent, flattened loop: the loads of the next tile start while this tile is being stored.
    for tile in tl.range(tl.program_id(0), tiles, programs, flatten=True):
        group = tile // per_group
        here = tl.minimum(row_blocks - group * height, height)
        block_row = group * height + (tile % per_group) % here
        block_column = (tile % per_group) // here
        acc = tl.zeros((BM, BN), tl.float32)
        for step in range(steps):
            a = hidden_desc.load([block_row * BM, step * BK])
            b = weight_desc.load([block_column * BN, step * BK])
            if WIDEN:
                a, b = a.to(tl.float32), b.to(tl.float32)
            acc = tl.dot(a, b.T, acc)
        rows = block_row * BM + tl.arange(0, BM)
        inside = rows < C
        scale = tl.load(SCALE + rows, mask=inside, other=0.0)
        center = tl.load(CENTER + rows, mask=inside, other=0.0)
        # The tile is stored in halves: the buffer of a half leaves shared memory for a second program.
        halves = tl.split(tl.permute(tl.reshape(acc, (BM, 2, BN // 2)), (0, 2, 1)))
        total = tl.zeros((BM,), tl.float32)
        weighted = tl.zeros((BM,), tl.float32)
        largest = tl.full((BM,), LOWEST, tl.float32)
        for half in tl.static_range(2):
            logits = halves[half]
            if ROUND:
                logits = logits.to(tl.bfloat16).to(tl.float32)
            start = block_column * BN + half * (BN // 2)
            columns = start + tl.arange(0, BN // 2)
            z = logits * scale[:, None] - center[:, None]
            if start + BN // 2 > real:
                z = tl.where(columns[None, :] < real, z, FLOOR)
            if MAXIMUM:
                largest = tl.maximum(largest, tl.max(z, 1))
            else:
                e = tl.exp2(z)
                if STORE:
                    out_desc.store([block_row * BM, start], e.to(out_desc.dtype))
                if STATS:
                    total += tl.sum(e, 1)
                    if ENTROPY:
                        weighted += tl.sum(e * z, 1)
        at = block_column.to(tl.int64) * C + rows
        if MAXIMUM:
            tl.store(SUMS + at, largest, mask=inside)
        elif STATS:
            tl.store(SUMS + at, total, mask=inside)
            if ENTROPY:
                tl.store(WEIGHTED + at, weighted, mask=inside)


@triton.jit(do_not_specialize=["WEIGHTED", "CENTER", "TARGETS", "C"])
def _block_sums_kernel(
    SUMS, WEIGHTED, CENTER, TARGETS, STATS, FLAG, C, B, first, real, limit,
    CONDITIONAL: tl.constexpr, ENTROPY: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    if CONDITIONAL:  # noqa: SIM102 (a Python `and` would load the flag in both cases)
        if tl.load(FLAG) == 0:
            return
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = rows < C
    total = tl.zeros([STEP, BLOCK], tl.float32)
    weighted = tl.zeros([STEP, BLOCK], tl.float32)
    for start in range(0, B, STEP):
        block = start + tl.arange(0, STEP)
        at = block[:, None].to(tl.int64) * C + rows[None, :]
        mask = (block < B)[:, None] & inside[None, :]
        total += tl.load(SUMS + at, mask=mask, other=0.0)
        if ENTROPY:
            weighted += tl.load(WEIGHTED + at, mask=mask, other=0.0)
    s = tl.sum(total, 0)
    center = tl.load(CENTER + rows, mask=inside, other=0.0)
    tl.store(STATS + rows, center * LN2, mask=inside)
    tl.store(STATS + C + rows, s, mask=inside)
    if ENTROPY:
        tl.store(STATS + 3 * C + rows, tl.sum(weighted, 0) * LN2, mask=inside)
    if not CONDITIONAL:  # until a center is raised, it is the target's z
        target = tl.load(TARGETS + rows, mask=inside, other=0).to(tl.int64)
        logit = tl.where((target >= first) & (target < first + real), center * LN2, 0.0)
        # A target outside the vocabulary has no log-prob. The NaN shows in every loss.
        logit = tl.where((target < 0) | (target >= limit), float("nan"), logit)
        tl.store(STATS + 2 * C + rows, logit, mask=inside)
        overflow = inside & ((s > SUM_LIMIT) | (s != s))
        if tl.max(overflow.to(tl.int32), 0) > 0:
            tl.store(FLAG, 1)


@triton.jit(do_not_specialize=["CENTER", "C"])
def _raise_centers_kernel(SUMS, CENTER, STATS, FLAG, C, B, BLOCK: tl.constexpr, STEP: tl.constexpr):
    """Moves an overflowed row's center to the row's maximum. SUMS holds the block maxima of z - center."""
    if tl.load(FLAG) == 0:
        return
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = rows < C
    largest = tl.full([STEP, BLOCK], LOWEST, tl.float32)
    for start in range(0, B, STEP):
        block = start + tl.arange(0, STEP)
        at = block[:, None].to(tl.int64) * C + rows[None, :]
        mask = (block < B)[:, None] & inside[None, :]
        largest = tl.maximum(largest, tl.load(SUMS + at, mask=mask, other=LOWEST))
    s = tl.load(STATS + C + rows, mask=inside, other=0.0)
    center = tl.load(CENTER + rows, mask=inside, other=0.0)
    shift = tl.where((s > SUM_LIMIT) | (s != s), tl.max(largest, 0), 0.0)
    tl.store(CENTER + rows, center + shift, mask=inside)


@triton.jit(do_not_specialize=["GRAD", "CENTER"])
def _row_factors_kernel(
    HIDDEN, GRAD, SCALE, CENTER, LSE, FACTOR, OUT, H, stride_h, BLOCK: tl.constexpr,
):  # fmt: skip
    """Computes FACTOR = -grad / temperature * exp(center - lse), and OUT = FACTOR * hidden."""
    row = tl.program_id(0).to(tl.int64)
    inverse_temperature = tl.load(SCALE + row) * LN2
    exponent = tl.load(CENTER + row) - tl.load(LSE + row) * LOG2E
    factor = -tl.load(GRAD + row).to(tl.float32) * inverse_temperature * tl.exp2(exponent)
    tl.store(FACTOR + row, factor)
    for start in range(0, H, BLOCK):
        at = start + tl.arange(0, BLOCK)
        h = tl.load(HIDDEN + row * stride_h + at, mask=at < H, other=0.0).to(tl.float32)
        tl.store(OUT + row * H + at, (h * factor).to(OUT.dtype.element_ty), mask=at < H)


@triton.jit
def _expm1(x):
    """Returns exp(x) - 1 for x <= 0. Near 0 a series keeps the digits that the subtraction would lose."""
    series = x * (1 + x * (0.5 + x * (1 / 6 + x * (1 / 24))))
    return tl.where(x > -0.01, series, tl.exp2(x * LOG2E) - 1)


@triton.jit(do_not_specialize=["TARGETS", "CENTER", "C", "real"])
def _target_entries_kernel(
    TILE, TARGETS, LOG_PROBS, CENTER, LSE, C, stride, first, real, BLOCK: tl.constexpr
):
    """Sets e[target] := (p - 1) * exp(lse - center). The factor of the row turns this into the gradient at the target,
    exact to float32 precision even if p is close to 1."""
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = rows < C
    column = tl.load(TARGETS + rows, mask=inside, other=-1).to(tl.int64) - first
    owned = inside & (column >= 0) & (column < real)
    log_p = tl.load(LOG_PROBS + rows, mask=owned, other=0.0)
    exponent = tl.load(LSE + rows, mask=owned, other=0.0) * LOG2E - tl.load(
        CENTER + rows, mask=owned, other=0.0
    )
    value = _expm1(log_p) * tl.exp2(exponent)
    tl.store(TILE + rows.to(tl.int64) * stride + column, value.to(TILE.dtype.element_ty), mask=owned)


@triton.jit(do_not_specialize=["GRAD", "GRAD_ENTROPY", "CENTER"])
def _entropy_gradient_kernel(
    TILE, HIDDEN, WEIGHT, GRAD, GRAD_ENTROPY, SCALE, CENTER, LSE, ENTROPY, V, H, stride, stride_h, stride_w,
    HAS_GRAD: tl.constexpr, ROUND: tl.constexpr, BLOCK: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Computes in place, from e, for all columns except the target: -p * (grad + grad_entropy * (log p + entropy)) /
    temperature, with p = e * exp(center - lse).

    log2(e) has an error of 0.003, from the rounding of e. This does not matter where p is small. The few likely columns
    of a row take their z from a dot product instead.
    """
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * BLOCK
    lanes = tl.arange(0, BLOCK)
    at = TILE + row * stride + first + lanes
    e = tl.load(at, mask=first + lanes < V, other=0.0).to(tl.float32)
    center = tl.load(CENTER + row)
    scale = tl.load(SCALE + row)
    exponent = center - tl.load(LSE + row) * LOG2E
    inverse_temperature = scale * LN2
    grad = tl.load(GRAD + row).to(tl.float32) if HAS_GRAD else 0.0
    grad_entropy = tl.load(GRAD_ENTROPY + row).to(tl.float32)
    factor = -inverse_temperature * tl.exp2(exponent)
    constant = factor * (grad + grad_entropy * (exponent * LN2 + tl.load(ENTROPY + row)))
    slope = factor * grad_entropy * LN2
    # Use the log2 of the smallest normal number instead of log2(0): the product with e = 0 is then 0.
    value = e * (constant + slope * tl.log2(tl.maximum(e, 1.2e-38)))
    tl.store(at, value.to(TILE.dtype.element_ty), mask=first + lanes < V)
    likely_e = LIKELY / tl.exp2(exponent)
    largest = tl.max(e, 0)
    if largest > likely_e:
        tl.debug_barrier()  # the stores below overwrite some of the stores above
        while largest > likely_e:
            best = tl.argmax(e, 0)
            z = _logit(
                HIDDEN + row * stride_h, WEIGHT + (first + best).to(tl.int64) * stride_w, H, ROUND, BLOCK_H
            )
            exact = largest * (constant + slope * (z * scale - center))
            tl.store(TILE + row * stride + first + best, exact.to(TILE.dtype.element_ty))
            e = tl.where(lanes == best, 0.0, e)
            largest = tl.max(e, 0)


@triton.jit(do_not_specialize=["TARGETS", "GRAD", "GRAD_ENTROPY", "C", "real"])
def _entropy_target_entries_kernel(
    TILE, TARGETS, GRAD, GRAD_ENTROPY, SCALE, LOG_PROBS, ENTROPY, C, stride, first, real,
    HAS_GRAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Computes the gradient at the target, where log p is already computed: (grad * (1 - p) - grad_entropy * p * (log p
    + entropy)) / t."""
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    column = tl.load(TARGETS + rows, mask=rows < C, other=-1).to(tl.int64) - first
    owned = (rows < C) & (column >= 0) & (column < real)
    log_p = tl.load(LOG_PROBS + rows, mask=owned, other=0.0)
    value = -_expm1(log_p) * tl.load(GRAD + rows, mask=owned, other=0.0).to(tl.float32) if HAS_GRAD else 0.0
    grad_entropy = tl.load(GRAD_ENTROPY + rows, mask=owned, other=0.0).to(tl.float32)
    entropy = tl.load(ENTROPY + rows, mask=owned, other=0.0)
    value = value - grad_entropy * tl.exp2(log_p * LOG2E) * (log_p + entropy)
    value = value * tl.load(SCALE + rows, mask=owned, other=0.0) * LN2
    tl.store(TILE + rows.to(tl.int64) * stride + column, value.to(TILE.dtype.element_ty), mask=owned)


@triton.jit
def _scale_rows_kernel(VALUES, FACTOR, OUT, H, stride_out, HAS_FACTOR: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    factor = tl.load(FACTOR + row) if HAS_FACTOR else 1.0
    for start in range(0, H, BLOCK):
        at = start + tl.arange(0, BLOCK)
        value = tl.load(VALUES + row * H + at, mask=at < H, other=0.0) * factor
        tl.store(OUT + row * stride_out + at, value.to(OUT.dtype.element_ty), mask=at < H)


@triton.jit(do_not_specialize=["FACTOR", "count"])
def _scale_kernel(VALUES, FACTOR, count, BLOCK: tl.constexpr):
    """Computes VALUES *= FACTOR, a scalar on the device. A factor of 1 writes nothing."""
    factor = tl.load(FACTOR)
    if factor == 1.0:
        return
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(VALUES + at, mask=at < count, other=0.0).to(tl.float32) * factor
    tl.store(VALUES + at, value.to(VALUES.dtype.element_ty), mask=at < count)


@cache
def programs(device: torch.device) -> int:
    """Returns the number of programs of a persistent launch."""
    if device.type != "cuda":
        return 2
    return torch.cuda.get_device_properties(device).multi_processor_count * PROGRAMS_PER_PROCESSOR


def hidden_block(width: int) -> int:
    """Returns the number of elements of a row that a program reads at a time."""
    block: int = triton.next_power_of_2(max(width, 16))
    return min(block, 4096)


TensorMaps = tuple[TensorDescriptor, TensorDescriptor, TensorDescriptor]
"""Tensor maps of hidden, weight and the tile."""


def descriptors(hidden: Tensor, weight: Tensor, out: Tensor | None) -> TensorMaps:
    """Returns the tensor maps of a product into `out` [C, V]. Without `out`, the third map is that of `hidden` and is
    not used."""
    left = TensorDescriptor.from_tensor(hidden, [BLOCK_ROWS, BLOCK_HIDDEN])
    right = TensorDescriptor.from_tensor(weight, [BLOCK_COLUMNS, BLOCK_HIDDEN])
    staged = left if out is None else TensorDescriptor.from_tensor(out, [BLOCK_ROWS, BLOCK_COLUMNS // 2])
    return left, right, staged


def launch_exp_product(
    maps: TensorMaps, rows: dict[str, Tensor], sums: Tensor | None, real: int, *,
    store: bool, rounding: bool, conditional: bool = False, maximum: bool = False,
) -> None:  # fmt: skip
    """Computes e = exp2(z - center) for the first `real` columns of `hidden @ weight.T`, and 0 in the other columns.

    `store` writes e into the tile of `maps`. `sums` [1 or 2, B, C], if given, receives the row sums per block of
    columns: first of e, then of e * (z - center). `rows` holds scale, center and, for conditional launches, the flag.
    `maximum`: `sums[0]` receives the block maxima of z - center instead. `conditional`: the launch does nothing unless
    the flag is set.
    """
    (tokens, width), columns = maps[0].shape, maps[1].shape[0]
    count = programs(rows["center"].device)
    weighted = sums[1] if sums is not None and len(sums) == 2 else None
    _exp_product_kernel[(count,)](
        *maps, rows["scale"], rows["center"], None if sums is None else sums[0], weighted, rows.get("flag"),
        tokens, columns, width, real, 8 if tokens <= FEW_ROWS else 4, count,
        CONDITIONAL=conditional, STORE=store and not maximum, STATS=sums is not None, ENTROPY=weighted is not None,
        MAXIMUM=maximum, ROUND=rounding, WIDEN=interpreted(),
        BM=BLOCK_ROWS, BN=BLOCK_COLUMNS, BK=BLOCK_HIDDEN, num_stages=STAGES, num_warps=4,
    )  # fmt: skip
