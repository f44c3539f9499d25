"""`swiglu` in plain PyTorch: the definition of correct. Autograd computes its gradient."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def swiglu_reference(x: Tensor, weights: Tensor | None = None) -> Tensor:
    """Computes x [..., 2 F], weights [...] -> [..., F], in the dtype of x."""
    gate, up = x.chunk(2, dim=-1)
    if weights is None:
        return F.silu(gate) * up
    wide = torch.promote_types(x.dtype, torch.float32)  # three factors would be rounded three times
    return (F.silu(gate.to(wide)) * up.to(wide) * weights[..., None]).to(x.dtype)
