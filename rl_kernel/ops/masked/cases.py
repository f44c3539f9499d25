"""Named shapes of the masked reductions, their inputs and the float64 formulas. Tests and benchmarks share them."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor


@dataclass(frozen=True)
class MaskedCase:
    """A shape: values with mean 5 and deviation 1. A third of the values is masked out and holds NaN."""

    name: str
    shape: tuple[int, ...]

    def inputs(
        self, dtype: torch.dtype = torch.float32, device: str = "cpu", seed: int = 0
    ) -> tuple[Tensor, Tensor]:
        """Returns values of `dtype` and a bool mask."""
        generator = torch.Generator().manual_seed(seed)
        values = 5 + torch.randn(self.shape, generator=generator)
        mask = torch.rand(self.shape, generator=generator) < 0.7
        if prod(self.shape) == 1:
            mask = torch.ones_like(mask)
        return torch.where(mask, values, float("nan")).to(device, dtype), mask.to(device)


CASES = (
    MaskedCase("nothing", (0,)),
    MaskedCase("one_entry", (1,)),
    MaskedCase("ragged", (333,)),
    MaskedCase("matrix", (7, 129)),
    MaskedCase("one_block", (4096,)),
    MaskedCase("blocks_and_a_rest", (9001,)),
)
"""Cases that are small enough for Triton's interpreter. The kernels' blocks hold 4096 entries."""

LARGE = (MaskedCase("many_blocks", (2**20,)), MaskedCase("long_programs_ragged", (2**23 + 13,)))


def formula(name: str, values: Tensor, mask: Tensor, *, shift_mean: bool = True) -> Tensor:
    """Computes the operator `name` in float64."""
    selected = values.double()[mask]
    if name == "masked_sum":
        return selected.sum()
    mean = selected.sum() / max(len(selected), 1)
    if name == "masked_mean":
        return mean
    variance = (selected - mean).square().sum() / max(len(selected) - 1, 1)
    white = (selected - mean) * (variance + 1e-8).rsqrt() + (0 if shift_mean else mean)
    return torch.zeros_like(values, dtype=torch.float64).masked_scatter(mask, white)
