"""One-dimensional blocks in Triton, which the masked reductions, `ratio_kl` and `grpo_loss` share.

Each program of a kernel over [N] processes one block. A block that is completely inside its tensor is read without a
mask: only then can Triton load four neighbours in one instruction, for any N. Only the last block is read with a mask.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

ALIGNMENT = 16
"""Alignment in bytes. One instruction can read four neighbours of float32 only if they start at a multiple of this
number."""


@triton.jit
def load(pointer, lane, left, FULL: tl.constexpr, stride=1):
    """Loads the entries `lane` of a block; 0 for lanes from `left` on, where the tensor has ended."""
    at = pointer + lane * stride
    return tl.load(at) if FULL else tl.load(at, mask=lane < left, other=0)


@triton.jit
def counts(MASK, lane, left, FULL: tl.constexpr):
    """Returns whether the mask counts each entry of a block. No entry counts beyond the end of the tensor."""
    value = load(MASK, lane, left, FULL)
    if value.dtype == tl.bfloat16:
        value = value.to(
            tl.float32
        )  # the interpreter compares the bits of a bfloat16, so that -0 would count
    return value != 0


@triton.jit
def store(pointer, lane, value, left, FULL: tl.constexpr):
    """Writes a block. Nothing is written beyond the end of the tensor."""
    if FULL:
        tl.store(pointer + lane, value)
    else:
        tl.store(pointer + lane, value, mask=lane < left)


@triton.jit(do_not_specialize=["COUNT"])
def add_rows_kernel(PARTIALS, OUT, COUNT, BLOCK: tl.constexpr):
    """Computes OUT[row] = PARTIALS[row, :COUNT].sum() in float64, always in the same order. One program per row."""
    row = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float64)
    for first in range(0, COUNT, BLOCK):
        total += tl.load(PARTIALS + row * COUNT + first + lane, mask=first + lane < COUNT, other=0.0)
    tl.store(OUT + row, tl.sum(total, 0).to(OUT.dtype.element_ty))


def add_rows(partials: Tensor, out: Tensor) -> None:
    """Computes `out.copy_(partials.sum(1))` for partials [rows, P] float64, P = 0 included."""
    rows, count = partials.shape
    # One program adds up a row. With wide blocks, few loads of a program wait for each other, even for millions of
    # tokens.
    block, warps = (8192, 16) if count > 1024 else (1024, 4)
    add_rows_kernel[(rows,)](partials, out, count, BLOCK=block, num_warps=warps)


def flat(value: Tensor) -> Tensor:
    """Returns the entries in row-major order, bool as bytes, as the kernels read them. Copies the tensor only if it is
    strided or not `aligned`."""
    if value.dim() != 1 or not value.is_contiguous():
        value = value.contiguous().view(-1)
    value = aligned(value)
    return value.view(torch.uint8) if value.dtype == torch.bool else value


def aligned(value: Tensor) -> Tensor:
    """Returns `value` if it starts at a multiple of 16 bytes, as new tensors do, otherwise a copy. For a tensor at
    another address, Triton compiles a second kernel, which reads slowly."""
    return value if value.data_ptr() % ALIGNMENT == 0 else value.clone()
