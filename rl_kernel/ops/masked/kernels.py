"""The masked reductions in Triton: each program computes float64 moments of a block, and one program merges the moments
in a fixed order.

The moments of counted entries are [number, sum, sum of squared distances from the mean]. The moments of two parts merge
exactly: the squared distances add up, plus the squared distances of the parts' means. So mean and variance need one
read of the values.

Legend: E entries, P programs.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from rl_kernel.ops.masked.blocks import add_rows, counts, load, store

BLOCK, WARPS = 4096, 8
LONG, LONG_FROM = 4, 2**22
MERGE_BLOCK, MERGE_WARPS = 4096, 16


@triton.jit
def _entries(VALUES, MASK, lane, left, FULL: tl.constexpr):
    """Returns the values of a block in float64, 0 for entries that are not counted, and whether each entry counts."""
    counted = counts(MASK, lane, left, FULL)
    values = load(VALUES, lane, left, FULL).to(tl.float32)
    return tl.where(counted, values, 0.0).to(tl.float64), counted


@triton.jit
def _moments(
    VALUES,
    MASK,
    PARTIALS,
    programs,
    left,
    SPREAD: tl.constexpr,
    REPEAT: tl.constexpr,
    BLOCK: tl.constexpr,
    FULL: tl.constexpr,
):
    lane = tl.arange(0, BLOCK)
    if SPREAD:
        values, counted = _entries(VALUES, MASK, lane, left, FULL)
        number = tl.sum(counted.to(tl.int32), 0).to(tl.float64)
        total = tl.sum(values, 0)
        centred = tl.where(counted, values - total / tl.maximum(number, 1.0), 0.0)
        tl.store(PARTIALS + 2 * programs, tl.sum(centred * centred, 0))
    else:
        numbers = tl.zeros([BLOCK], tl.int32)
        totals = tl.zeros([BLOCK], tl.float64)
        for step in range(0, REPEAT):
            at = step * BLOCK
            values, counted = _entries(VALUES + at, MASK + at, lane, left - at, FULL)
            numbers += counted.to(tl.int32)
            totals += values
        number = tl.sum(numbers, 0).to(tl.float64)
        total = tl.sum(totals, 0)
    tl.store(PARTIALS, number)
    tl.store(PARTIALS + programs, total)


@triton.jit(do_not_specialize=["E", "programs"])
def moments_kernel(
    VALUES,
    MASK,
    PARTIALS,
    E,
    programs,
    SPREAD: tl.constexpr,
    REPEAT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Writes PARTIALS [2 or 3, P]: the
    moments of a program's REPEAT blocks; with SPREAD all three moments, of a single block."""
    program = tl.program_id(0)
    at = program.to(tl.int64) * (BLOCK * REPEAT)
    # fmt: off
    if at + BLOCK * REPEAT <= E:
        _moments(VALUES + at, MASK + at, PARTIALS + program, programs, BLOCK * REPEAT, SPREAD, REPEAT, BLOCK, True)
    else:
        _moments(VALUES + at, MASK + at, PARTIALS + program, programs, E - at, SPREAD, REPEAT, BLOCK, False)
    # fmt: on


@triton.jit(do_not_specialize=["programs"])
def merge_kernel(
    PARTIALS, STATS, RESULT, programs, SPREAD: tl.constexpr, MEAN: tl.constexpr, BLOCK: tl.constexpr
):
    """Writes STATS, the moments of all partials, and RESULT, their sum or their mean. One program."""
    lane = tl.arange(0, BLOCK)
    number = tl.zeros([BLOCK], tl.float64)
    total = tl.zeros([BLOCK], tl.float64)
    for first in range(0, programs, BLOCK):
        here = first + lane < programs
        number += tl.load(PARTIALS + first + lane, mask=here, other=0.0)
        total += tl.load(PARTIALS + programs + first + lane, mask=here, other=0.0)
    all_number = tl.sum(number, 0)
    all_total = tl.sum(total, 0)
    mean = all_total / tl.maximum(all_number, 1.0)
    tl.store(STATS, all_number)
    tl.store(STATS + 1, all_total)
    tl.store(RESULT, (mean if MEAN else all_total).to(tl.float32))
    if SPREAD:
        spread = tl.zeros([BLOCK], tl.float64)
        for first in range(0, programs, BLOCK):
            here = first + lane < programs
            part_number = tl.load(PARTIALS + first + lane, mask=here, other=0.0)
            part_total = tl.load(PARTIALS + programs + first + lane, mask=here, other=0.0)
            distance = part_total / tl.maximum(part_number, 1.0) - mean
            spread += tl.load(PARTIALS + 2 * programs + first + lane, mask=here, other=0.0)
            spread += part_number * distance * distance
        tl.store(STATS + 2, tl.sum(spread, 0))


@triton.jit
def _halves(value):
    """Returns a float64 scalar as the sum of two float32 numbers. Subtracting both numbers in turn keeps the digits of
    float32."""
    high = value.to(tl.float32)
    return high, (value - high.to(tl.float64)).to(tl.float32)


@triton.jit
def _scale(STATS, eps):
    """Returns mean and 1 / deviation, float64 scalars."""
    number = tl.load(STATS)
    mean = tl.load(STATS + 1) / tl.maximum(number, 1.0)
    variance = tl.load(STATS + 2) / tl.maximum(number - 1.0, 1.0)
    return mean, 1.0 / tl.sqrt(variance + eps)


@triton.jit
def _whiten_block(
    VALUES,
    MASK,
    OUT,
    mean_high,
    mean_low,
    scale,
    left,
    SHIFT: tl.constexpr,
    BLOCK: tl.constexpr,
    FULL: tl.constexpr,
):
    lane = tl.arange(0, BLOCK)
    counted = counts(MASK, lane, left, FULL)
    values = load(VALUES, lane, left, FULL).to(tl.float32)
    white = ((values - mean_high) - mean_low) * scale
    if not SHIFT:
        white = white + mean_low + mean_high
    store(OUT, lane, tl.where(counted, white, 0.0), left, FULL)


@triton.jit(do_not_specialize=["E"])
def whiten_kernel(VALUES, MASK, STATS, OUT, E, eps, SHIFT: tl.constexpr, BLOCK: tl.constexpr):
    """Writes the whitened values of a block; 0 for entries that are not counted."""
    at = tl.program_id(0).to(tl.int64) * BLOCK
    mean, scale = _scale(STATS, eps)
    high, low = _halves(mean)
    scale = scale.to(tl.float32)
    if at + BLOCK <= E:
        _whiten_block(VALUES + at, MASK + at, OUT + at, high, low, scale, BLOCK, SHIFT, BLOCK, True)
    else:
        _whiten_block(VALUES + at, MASK + at, OUT + at, high, low, scale, E - at, SHIFT, BLOCK, False)


@triton.jit
def _whiten_sums(VALUES, MASK, D_OUT, high, low, left, BLOCK: tl.constexpr, FULL: tl.constexpr):
    """Returns the two sums of `whiten_sums_kernel`."""
    lane = tl.arange(0, BLOCK)
    counted = counts(MASK, lane, left, FULL)
    values = load(VALUES, lane, left, FULL).to(tl.float32)
    grad = load(D_OUT, lane, left, FULL).to(tl.float32)
    centred = tl.where(counted, (values - high) - low, 0.0).to(tl.float64)
    grad = tl.where(counted, grad, 0.0).to(tl.float64)
    return tl.sum(grad, 0), tl.sum(grad * centred, 0)


@triton.jit(do_not_specialize=["E", "blocks"])
def whiten_sums_kernel(VALUES, MASK, STATS, D_OUT, PARTIALS, E, blocks, BLOCK: tl.constexpr):
    """Writes PARTIALS [2, P]: for one block, the sum of the gradient, and the sum of gradient * distance from the
    mean."""
    program = tl.program_id(0)
    at = program.to(tl.int64) * BLOCK
    high, low = _halves(tl.load(STATS + 1) / tl.maximum(tl.load(STATS), 1.0))
    if at + BLOCK <= E:
        total, product = _whiten_sums(VALUES + at, MASK + at, D_OUT + at, high, low, BLOCK, BLOCK, True)
    else:
        total, product = _whiten_sums(VALUES + at, MASK + at, D_OUT + at, high, low, E - at, BLOCK, False)
    tl.store(PARTIALS + program, total)
    tl.store(PARTIALS + blocks + program, product)


@triton.jit
def _whiten_grad(
    VALUES, MASK, D_OUT, D_VALUES, high, low, grad_high, grad_low, scale, pull, left,
    SHIFT: tl.constexpr, BLOCK: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    lane = tl.arange(0, BLOCK)
    counted = counts(MASK, lane, left, FULL)
    values = load(VALUES, lane, left, FULL).to(tl.float32)
    grad = load(D_OUT, lane, left, FULL).to(tl.float32)
    centred = (values - high) - low
    grad = ((grad - grad_high) - grad_low) * scale - centred * pull
    if not SHIFT:
        grad = grad + grad_high
    store(D_VALUES, lane, tl.where(counted, grad, 0.0).to(D_VALUES.dtype.element_ty), left, FULL)


@triton.jit(do_not_specialize=["E"])
def whiten_backward_kernel(
    VALUES, MASK, STATS, SUMS, D_OUT, D_VALUES, E, eps, SHIFT: tl.constexpr, BLOCK: tl.constexpr
):
    """Writes d_values of a block, with s = 1 / deviation, c = values - mean and g the gradient of the result: `s * (g
    - g.mean()) - s**3 * c * (g * c).sum() / (n - 1)`, plus `g.mean()` where the mean was added back."""
    at = tl.program_id(0).to(tl.int64) * BLOCK
    number = tl.load(STATS)
    mean, scale = _scale(STATS, eps)
    high, low = _halves(mean)
    grad_high, grad_low = _halves(tl.load(SUMS) / tl.maximum(number, 1.0))
    pull = (scale * scale * scale * tl.load(SUMS + 1) / tl.maximum(number - 1.0, 1.0)).to(tl.float32)
    scale = scale.to(tl.float32)
    # fmt: off
    if at + BLOCK <= E:
        _whiten_grad(VALUES + at, MASK + at, D_OUT + at, D_VALUES + at, high, low, grad_high, grad_low, scale, pull,
                     BLOCK, SHIFT, BLOCK, True)
    else:
        _whiten_grad(VALUES + at, MASK + at, D_OUT + at, D_VALUES + at, high, low, grad_high, grad_low, scale, pull,
                     E - at, SHIFT, BLOCK, False)
    # fmt: on


@triton.jit
def _spread_grad(MASK, D_VALUES, grad, left, BLOCK: tl.constexpr, FULL: tl.constexpr):
    lane = tl.arange(0, BLOCK)
    grad = tl.where(counts(MASK, lane, left, FULL), grad, 0.0)
    store(D_VALUES, lane, grad.to(D_VALUES.dtype.element_ty), left, FULL)


@triton.jit(do_not_specialize=["UPSTREAM", "E"])
def spread_grad_kernel(MASK, STATS, UPSTREAM, D_VALUES, E, MEAN: tl.constexpr, BLOCK: tl.constexpr):
    """Writes d_values of a sum or a mean: one number for all counted entries, 0 for the others."""
    at = tl.program_id(0).to(tl.int64) * BLOCK
    grad = tl.load(UPSTREAM).to(tl.float32)
    if MEAN:
        grad = (grad.to(tl.float64) / tl.maximum(tl.load(STATS), 1.0)).to(tl.float32)
    if at + BLOCK <= E:
        _spread_grad(MASK + at, D_VALUES + at, grad, BLOCK, BLOCK, True)
    else:
        _spread_grad(MASK + at, D_VALUES + at, grad, E - at, BLOCK, False)


def moments(values: Tensor, mask: Tensor, *, spread: bool, mean: bool = False) -> tuple[Tensor, Tensor]:
    """Returns (number, sum and, with `spread`, squared distances [2 or 3] float64; sum or mean float32) of flat
    tensors."""
    entries, rows = values.numel(), 3 if spread else 2
    # With fewer and longer programs, the program that merges has fewer partial sums to add.
    repeat = LONG if entries > LONG_FROM and not spread else 1
    programs = triton.cdiv(entries, BLOCK * repeat)
    partials = torch.empty(rows, programs, dtype=torch.float64, device=values.device)
    stats = partials.new_empty(rows)
    result = partials.new_empty((), dtype=torch.float32)
    with torch.cuda.device_of(values):
        if programs:
            moments_kernel[(programs,)](
                values,
                mask,
                partials,
                entries,
                programs,
                SPREAD=spread,
                REPEAT=repeat,
                BLOCK=BLOCK,
                num_warps=WARPS,
            )
        merge_kernel[(1,)](
            partials,
            stats,
            result,
            programs,
            SPREAD=spread,
            MEAN=mean,
            BLOCK=MERGE_BLOCK,
            num_warps=MERGE_WARPS,
        )
    return stats, result


def whiten(values: Tensor, mask: Tensor, stats: Tensor, eps: float, shift_mean: bool) -> Tensor:
    """Returns the whitened values [E] float32 for the given moments [3]."""
    out = torch.empty_like(values, dtype=torch.float32)
    if entries := values.numel():
        with torch.cuda.device_of(values):
            whiten_kernel[(triton.cdiv(entries, BLOCK),)](
                values, mask, stats, out, entries, float(eps), SHIFT=shift_mean, BLOCK=BLOCK, num_warps=WARPS
            )
    return out


def whiten_backward(
    values: Tensor, mask: Tensor, stats: Tensor, eps: float, shift_mean: bool, d_out: Tensor
) -> Tensor:
    """Returns d_values [E] in the dtype of `values`."""
    grad = torch.empty_like(values)
    if entries := values.numel():
        blocks = triton.cdiv(entries, BLOCK)
        partials = stats.new_empty(2, blocks)
        sums = stats.new_empty(2)
        with torch.cuda.device_of(values):
            whiten_sums_kernel[(blocks,)](
                values, mask, stats, d_out, partials, entries, blocks, BLOCK=BLOCK, num_warps=WARPS
            )
            add_rows(partials, sums)
            whiten_backward_kernel[(blocks,)](
                values,
                mask,
                stats,
                sums,
                d_out,
                grad,
                entries,
                float(eps),
                SHIFT=shift_mean,
                BLOCK=BLOCK,
                num_warps=WARPS,
            )
    return grad


def spread_grad(mask: Tensor, stats: Tensor, upstream: Tensor, dtype: torch.dtype, *, mean: bool) -> Tensor:
    """Returns d_values [E] of the sum or the mean."""
    grad = torch.empty_like(mask, dtype=dtype)
    if entries := mask.numel():
        with torch.cuda.device_of(mask):
            spread_grad_kernel[(triton.cdiv(entries, BLOCK),)](
                mask, stats, upstream, grad, entries, MEAN=mean, BLOCK=BLOCK, num_warps=WARPS
            )
    return grad
