"""Matrix products into a given tensor, with float32 sums whatever the dtype of the operands. cuBLAS does the work."""

from __future__ import annotations

import torch
from torch import Tensor


def product_(out: Tensor, left: Tensor, right: Tensor, *, add: bool = False) -> Tensor:
    """`out = left @ right`, or `out += left @ right`; `out` may be float32 for narrower operands of one dtype.

    left [M, K], right [K, N], out [M, N]. Deterministic for one shape, device and library version.
    """
    if out.dtype == left.dtype:
        return torch.addmm(out, left, right, out=out) if add else torch.mm(left, right, out=out)
    if left.is_cuda and out.dtype == torch.float32:
        if add:
            torch.ops.aten.addmm.dtype_out(out, left, right, torch.float32, out=out)
        else:
            torch.ops.aten.mm.dtype_out(left, right, torch.float32, out=out)
        return out
    wide = left.float() @ right.float()
    return out.add_(wide) if add else out.copy_(wide)
