"""Named shapes of `swiglu`, their inputs and the float64 formula. Tests and benchmarks share them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class SwigluCase:
    """A shape: x [*rows, 2 F]. The gates have the standard deviation `spread`, so that some sigmoids saturate."""

    name: str
    rows: tuple[int, ...]
    width: int
    spread: float = 3.0

    def inputs(
        self, dtype: torch.dtype = torch.float32, device: str = "cpu", seed: int = 0
    ) -> tuple[Tensor, Tensor]:
        """Returns x [*rows, 2 F] and an upstream gradient [*rows, F]."""
        generator = torch.Generator(device).manual_seed(seed)

        def normal() -> Tensor:
            return torch.randn(*self.rows, self.width, generator=generator, device=device)

        x = torch.cat((self.spread * normal(), normal()), -1)
        return x.to(dtype), normal().to(dtype)


CASES = (
    SwigluCase("no_rows", (0,), 8),
    SwigluCase("no_columns", (3,), 0),
    SwigluCase("one_element", (1,), 1),
    SwigluCase("ragged", (5,), 37),
    SwigluCase("one_block", (3,), 2048),
    SwigluCase("blocks_and_a_rest", (3,), 2500),
    SwigluCase("batched", (4, 1, 3), 24),
    SwigluCase("large_gates", (7,), 100, spread=20.0),
)
"""Cases that are small enough for Triton's interpreter. The kernels' blocks hold 2048 columns."""

LARGE = (SwigluCase("qwen3_4b", (16384,), 9728), SwigluCase("ragged_rows", (4099, 1), 3001))


def formula(x: Tensor) -> Tensor:
    """Computes the definition in float64."""
    gate, up = x.double().chunk(2, dim=-1)
    return gate * torch.sigmoid(gate) * up
