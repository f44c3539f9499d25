"""`swiglu` in plain PyTorch: the definition of correct. Autograd gives its gradient."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def swiglu_reference(x: Tensor) -> Tensor:
    """x [..., 2 F] -> [..., F], in the dtype of x."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up
