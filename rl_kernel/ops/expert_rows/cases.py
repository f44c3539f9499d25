"""Named shapes of `expert_dispatch` and `expert_combine`, their inputs and the float64 formulas. Tests and benchmarks
share them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rl_kernel.ops.expert_rows.reference import expert_rows


@dataclass(frozen=True)
class ExpertRowsCase:
    """A shape: `tokens` tokens with `topk` of `experts` experts each. This rank has the experts `first` to `first +
    here - 1`."""

    name: str
    tokens: int
    width: int
    experts: int
    topk: int
    first: int = 0
    here: int | None = None

    def ids(self, device: str = "cpu", seed: int = 0) -> Tensor:
        """Returns expert ids [T, K]. The experts of a token differ."""
        generator = torch.Generator(device).manual_seed(seed)
        scores = torch.rand(self.tokens, self.experts, generator=generator, device=device)
        return scores.topk(self.topk, dim=1).indices

    def rows(self, device: str = "cpu", seed: int = 0) -> tuple[Tensor, Tensor]:
        """Returns `expert_rows` of the case: rows [T, K] and counts."""
        here = self.experts if self.here is None else self.here
        return expert_rows(self.ids(device, seed), self.first, here)

    def inputs(
        self, dtype: torch.dtype = torch.float32, device: str = "cpu", seed: int = 0
    ) -> tuple[Tensor, Tensor]:
        """Returns x [T, H] of `dtype`, and weights [T, K] in float32 whose sum per token is 1."""
        generator = torch.Generator(device).manual_seed(seed + 1)
        x = torch.randn(self.tokens, self.width, generator=generator, device=device).to(dtype)
        scores = torch.randn(self.tokens, self.topk, generator=generator, device=device)
        return x, scores.softmax(1)


CASES = (
    ExpertRowsCase("no_tokens", 0, 8, 4, 2),
    ExpertRowsCase("no_columns", 3, 0, 4, 2),
    ExpertRowsCase("one_token", 1, 1, 1, 1),
    ExpertRowsCase("ragged", 7, 37, 5, 3),
    ExpertRowsCase("half_of_the_experts", 9, 16, 8, 3, first=4, here=4),
    ExpertRowsCase("few_of_the_experts", 9, 16, 64, 2, first=5, here=2),
    ExpertRowsCase("blocks_and_a_rest", 3, 2500, 6, 4),
)
"""Cases that are small enough for Triton's interpreter. The kernels' blocks hold 2048 columns."""

LARGE = (
    ExpertRowsCase("qwen3_30b_a3b", 69632, 2048, 128, 8, first=32, here=32),
    ExpertRowsCase("ragged_rows", 4099, 3001, 20, 3),
)


def dispatch_formula(x: Tensor, weights: Tensor, rows: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """Computes the definition of `expert_dispatch` in float64, by a matrix of zeros and ones."""
    chosen = _chosen(rows, total)
    return chosen.sum(2) @ x.double(), (chosen * weights.double()).sum((1, 2))


def combine_formula(y: Tensor, rows: Tensor) -> Tensor:
    """Computes the definition of `expert_combine` in float64, by a matrix of zeros and ones."""
    return _chosen(rows, len(y)).sum(2).T @ y.double()


def _chosen(rows: Tensor, total: int) -> Tensor:
    """Returns [C, T, K]: 1 where the row belongs to the (token, k) pair."""
    return (torch.arange(total, device=rows.device)[:, None, None] == rows[None]).double()
