"""`rotary` in plain PyTorch: the definition of correct. Autograd computes its gradient."""

from __future__ import annotations

import torch
from torch import Tensor


def rotary_reference(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Returns x [T, heads, D] rotated. cos and sin [T, 1, D / 2] are converted to the dtype of x."""
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1)
