"""Named shapes of `rotary`, their inputs and the float64 formula. Tests and benchmarks share them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class RotaryCase:
    """A shape: x [tokens, heads, size], a view of fused rows. Each row holds `extra` further values before the
    heads."""

    name: str
    tokens: int
    heads: int
    size: int
    extra: int = 0

    def inputs(
        self, dtype: torch.dtype = torch.float32, device: str = "cpu", seed: int = 0
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Returns x, cos and sin [tokens, 1, size / 2] in float32 of positions up to 2**15, and an upstream gradient
        like x."""
        generator = torch.Generator(device).manual_seed(seed)

        def normal(width: int) -> Tensor:
            return torch.randn(self.tokens, width, generator=generator, device=device)

        row = self.heads * self.size
        x = normal(row + self.extra).to(dtype)[:, self.extra :].unflatten(1, (self.heads, self.size))
        upstream = normal(row).to(dtype).view(x.shape)
        positions = torch.randint(2**15, (self.tokens,), generator=generator, device=device)
        steps = torch.arange(self.size // 2, device=device) / max(self.size // 2, 1)
        angles = positions[:, None, None] / 1e6**steps
        return x, angles.cos(), angles.sin(), upstream


CASES = (
    RotaryCase("no_tokens", 0, 2, 8),
    RotaryCase("no_heads", 3, 0, 8),
    RotaryCase("no_size", 3, 2, 0),
    RotaryCase("one_pair", 1, 1, 2),
    RotaryCase("ragged", 5, 3, 10),
    RotaryCase("heads_of_a_row", 7, 4, 16, extra=24),
    RotaryCase("odd_heads", 9, 5, 32, extra=3),
)
"""Cases that are small enough for Triton's interpreter. A program rotates all heads of a token."""

LARGE = (
    RotaryCase("qwen3_4b_query", 16384, 32, 128, extra=2048),
    RotaryCase("qwen3_4b_key", 16384, 8, 128, extra=5120),
    RotaryCase("ragged_heads", 4099, 7, 96),
)


def formula(x: Tensor, cos: Tensor, sin: Tensor, rounded: torch.dtype | None = None) -> Tensor:
    """Computes the definition in float64, with cos and sin rounded to the dtype of x (or to `rounded`)."""
    cos, sin = (table.to(rounded or x.dtype).double() for table in (cos, sin))
    x1, x2 = x.double().chunk(2, dim=-1)
    return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1)
