"""One-dimensional blocks in Triton: what the masked reductions, `ratio_kl` and `grpo_loss` share.

A kernel that walks [N] gives each program one block. A block that lies wholly inside its tensor is read without a
mask: only then can Triton fetch four neighbours in one instruction whatever N is; the last block pays for the rest.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def load(pointer, lane, left, FULL: tl.constexpr, stride=1):
    """Entries `lane` of a block that has `left` entries before the tensor ends; 0 beyond."""
    at = pointer + lane * stride
    return tl.load(at) if FULL else tl.load(at, mask=lane < left, other=0)


@triton.jit
def counts(MASK, lane, left, FULL: tl.constexpr):
    """Which entries of a block the mask counts; none beyond the end."""
    value = load(MASK, lane, left, FULL)
    if value.dtype == tl.bfloat16:
        value = value.to(tl.float32)  # the interpreter compares the bits of a bfloat16: -0 would count
    return value != 0


@triton.jit
def store(pointer, lane, value, left, FULL: tl.constexpr):
    """The counterpart of `load`: nothing is written beyond the end."""
    if FULL:
        tl.store(pointer + lane, value)
    else:
        tl.store(pointer + lane, value, mask=lane < left)


@triton.jit(do_not_specialize=["COUNT"])
def add_rows_kernel(PARTIALS, OUT, COUNT, BLOCK: tl.constexpr):
    """OUT[row] = PARTIALS[row, :COUNT].sum() in float64, always in the same order. One program a row."""
    row = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float64)
    for first in range(0, COUNT, BLOCK):
        total += tl.load(PARTIALS + row * COUNT + first + lane, mask=first + lane < COUNT, other=0.0)
    tl.store(OUT + row, tl.sum(total, 0).to(OUT.dtype.element_ty))


def add_rows(partials: Tensor, out: Tensor) -> None:
    """`out.copy_(partials.sum(1))` for partials [rows, P] float64, P = 0 included."""
    rows, count = partials.shape
    # One program adds up a row: wide blocks keep the number of dependent fetches low for millions of tokens.
    block, warps = (8192, 16) if count > 1024 else (1024, 4)
    add_rows_kernel[(rows,)](partials, out, count, BLOCK=block, num_warps=warps)


def flat(value: Tensor) -> Tensor:
    """The entries in row-major order as kernels read them: a copy only of a strided tensor; bool as bytes."""
    if value.dim() != 1 or not value.is_contiguous():
        value = value.contiguous().view(-1)
    return value.view(torch.uint8) if value.dtype == torch.bool else value
