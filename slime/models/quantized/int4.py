"""Numbers of four bits in groups that share a scale: codes, scales, and the packing of compressed-tensors.

Shapes: O outputs, I inputs of a weight. torch is imported only to compute.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor, dtype

BITS = 4
PER_WORD = 32 // BITS
_MOST = 2 ** (BITS - 1) - 1
_SMALLEST = 1e-12
"""Lower bound of a group's largest value. It avoids a division by zero."""
_CHUNK = 2**24
"""Elements that `round_groups` quantises at a time. Each needs about 40 bytes in between."""


def fit_groups(weight: Tensor, group: int, dtype: dtype) -> tuple[Tensor, Tensor]:
    """Returns the codes int32 [O, I] and the scales [O, I / group] of a weight."""
    import torch

    groups = weight.float().unflatten(1, (-1, group))
    most = groups.abs().amax(-1, keepdim=True).clamp(min=_SMALLEST)

    def codes_for(scales: Tensor) -> Tensor:
        rounded: Tensor = (groups / scales).round().clamp(-_MOST - 1, _MOST)
        return rounded

    def fitted(codes: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the scales with the smallest squared errors for `codes`, and these errors."""
        squares = codes.square().sum(-1, keepdim=True).clamp(min=1)
        scales = ((groups * codes).sum(-1, keepdim=True) / squares).to(dtype).float()
        return scales, (groups - codes * scales).square().sum(-1, keepdim=True)

    (scales, error), (others, other) = (fitted(codes_for(most / steps)) for steps in (_MOST, _MOST + 1))
    scales = others.where(other < error, scales)
    codes = codes_for(scales.clamp(min=torch.finfo(torch.float32).tiny))
    return codes.flatten(1).to(torch.int32), scales[..., 0].to(dtype)


def round_groups(weight: Tensor, group: int, dtype: dtype) -> Tensor:
    """Returns `codes * scales` in the dtype of the weight, after rounding to bfloat16, which engines compute with."""
    import torch

    values = torch.empty_like(weight)
    rows = max(1, _CHUNK // weight.shape[1])
    for part, out in zip(weight.split(rows), values.split(rows), strict=True):
        codes, scales = fit_groups(part, group, dtype)
        products = codes.unflatten(1, (-1, group)) * scales[..., None].float()
        out.copy_(products.flatten(1).to(torch.bfloat16))
    return values


def pack(codes: Tensor) -> Tensor:
    """Returns codes in [-8, 7] as int32 [O, I / 8], the lowest four bits first, with 8 added to each code."""
    import torch

    words = (codes.to(torch.int64) + _MOST + 1).unflatten(1, (-1, PER_WORD))
    shifts = torch.arange(0, 32, BITS, device=codes.device)
    packed: Tensor = (words << shifts).sum(-1).to(torch.int32)
    return packed


def unpack(packed: Tensor, columns: int) -> Tensor:
    """Returns the codes in [-8, 7] of `pack`, as int32 [O, columns]."""
    import torch

    shifts = torch.arange(0, 32, BITS, dtype=torch.int32, device=packed.device)
    codes: Tensor = (packed[..., None] >> shifts & 2**BITS - 1).flatten(1)[:, :columns] - _MOST - 1
    return codes
