"""The kernel of `rl_kernel.stacked`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK, WARPS = 4096, 8


@triton.jit(do_not_specialize=["PARTS"])
def add_kernel(TOTALS, PARTS, N, BLOCK: tl.constexpr):
    """Adds BLOCK elements of a part to the float32 tensor whose address is in TOTALS. N: elements of a part."""
    index = tl.program_id(1).to(tl.int64)
    lane = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = lane < N
    total = tl.multiple_of(tl.load(TOTALS + index).to(tl.pointer_type(tl.float32)), 16)
    part = tl.load(PARTS + index * N + lane, inside, other=0.0).to(tl.float32)
    tl.store(total + lane, tl.load(total + lane, inside, other=0.0) + part, inside)


def add_stacked(totals: Tensor, parts: Tensor) -> None:
    """Adds parts [E, ...], contiguous, to the float32 tensors with the addresses `totals`, int64 [E]."""
    size = parts[0].numel()
    if size:
        with torch.cuda.device_of(parts):
            add_kernel[(-(-size // BLOCK), len(parts))](totals, parts, size, BLOCK=BLOCK, num_warps=WARPS)
