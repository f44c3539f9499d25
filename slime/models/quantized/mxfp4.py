"""MXFP4 (OCP microscaling formats 1.0): 4-bit floats in blocks of 32 with one power of two per block.

torch is imported only to compute.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Values of the codes 0 to 7. Codes 8 to 15 are the same values with a minus sign."""


def dequantized(blocks: Tensor, scales: Tensor) -> Tensor:
    """Returns `values[codes] * 2 ** (scales - 127)`: blocks uint8 [..., B, 16] (the lower four bits are the earlier
    code) and scales uint8 [..., B] -> bfloat16 [..., 32 B]. bfloat16 represents all these numbers, so there is no
    rounding."""
    import torch

    table = torch.tensor([*VALUES, *(-value for value in VALUES)], dtype=torch.bfloat16, device=blocks.device)
    codes = torch.stack([blocks & 15, blocks >> 4], dim=-1).flatten(-2)
    return torch.ldexp(table[codes.int()], scales[..., None].int() - 127).flatten(-2)
