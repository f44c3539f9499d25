"""Matrix products into a given tensor, by cuBLAS. The sums are in float32 for every dtype of the operands."""

from __future__ import annotations

import torch
from torch import Tensor


def product_(out: Tensor, left: Tensor, right: Tensor, *, add: bool = False) -> Tensor:
    """Computes `out = left @ right`, or `out += left @ right` if `add`. Returns `out`.

    left [M, K] and right [K, N] have one dtype; out [M, N] has the same dtype or float32. Deterministic for one shape,
    device and library version.
    """
    if out.dtype == left.dtype:
        return torch.addmm(out, left, right, out=out) if add else torch.mm(left, right, out=out)
    if left.is_cuda and out.dtype == torch.float32:
        if add:
            torch.ops.aten.addmm.dtype_out(out, left, right, torch.float32, out=out)
        else:
            torch.ops.aten.mm.dtype_out(left, right, torch.float32, out=out)
        return out
    wide = torch.mm(
        left.float(), right.float(), out=torch.empty_like(out)
    )  # with `out=`, a caller's autocast has no effect
    return out.add_(wide) if add else out.copy_(wide)
