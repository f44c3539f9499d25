"""Named shapes of the fp8 layers and their inputs. Tests and benchmarks share them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Fp8Case:
    """A shape: x [rows, inputs], weights [experts, outputs, inputs]. `shares` are the rows of each expert; without
    them, there is one weight."""

    name: str
    rows: int
    inputs: int
    outputs: int
    shares: tuple[int, ...] = ()

    def tensors(
        self, dtype: torch.dtype = torch.float32, device: str = "cpu", seed: int = 0
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns x, the weights [E, M, K] and the output's gradient. Rows and columns differ in size, as activations
        with outliers do."""
        generator = torch.Generator(device).manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, device=device)

        x = normal(self.rows, self.inputs) * normal(self.rows, 1).exp() * normal(1, self.inputs).exp()
        weights = normal(len(self.shares) or 1, self.outputs, self.inputs) * self.inputs**-0.5
        return x.to(dtype), weights.to(dtype), normal(self.rows, self.outputs).to(dtype)

    def ends(self, device: str = "cpu") -> Tensor | None:
        """Returns where each expert's rows end, int32 [E]."""
        if not self.shares:
            return None
        return torch.tensor(self.shares, device=device).cumsum(0, dtype=torch.int32)


CASES = (
    Fp8Case("no_rows", 0, 128, 128),
    Fp8Case("one_row", 1, 128, 256),
    Fp8Case("ragged", 130, 384, 128),
    Fp8Case("blocks", 256, 256, 384),
    Fp8Case("experts", 200, 128, 256, (129, 0, 1, 70)),
    Fp8Case("experts_without_rows", 0, 128, 128, (0, 0)),
)
"""Cases that are small enough for Triton's interpreter."""

LARGE = (
    Fp8Case("qwen3_4b_qkv", 16384, 2560, 6144),
    Fp8Case("qwen3_4b_out", 16384, 4096, 2560),
    Fp8Case("qwen3_4b_up", 16384, 2560, 19456),
    Fp8Case("qwen3_4b_down", 16384, 9728, 2560),
    Fp8Case("ragged_rows", 4099, 2560, 6144),
    Fp8Case("qwen3_30b_a3b_up", 65536, 2048, 1536, (2048,) * 32),
    Fp8Case("uneven_experts", 10007, 2048, 1536, (4096, 1, 0, 5000, 127, 783, 0, 0)),
)
