"""The output layer on a device: row statistics and gradients of `hidden @ weight.T`, column tile by column tile.

Owns what the two ways of going through the tiles share: which columns are kept, the three sums of the backward, the
vocabulary-parallel parts. `ExpHead` (exponentials straight from the product) and `PlainHead` (logits, then row kernels)
say how one tile is made. `linear_logp` and `linear_token_loss` drive them; nothing here reads a value to the host.

Legend: N tokens, H hidden, V columns of this process, C columns of a tile.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from rl_kernel.gemm import product_
from rl_kernel.kept import KeptTokens
from rl_kernel.ops.linear_logp.plan import Budget, Costs
from rl_kernel.vocab import VocabShard


@dataclass(frozen=True)
class Problem:
    """Inputs of one call, or of a block of its rows. `temperature`: a positive number or [N] float32."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    targets: Tensor
    temperature: float | Tensor
    keep: KeptTokens | None
    shard: VocabShard
    rounding: torch.dtype | None

    def rows(self, rows: slice) -> Problem:
        """The same layer for some of the tokens."""
        per_token = self.temperature[rows] if isinstance(self.temperature, Tensor) else self.temperature
        keep = None if self.keep is None else self.keep.rows(rows)
        return Problem(
            self.hidden[rows],
            self.weight,
            self.bias,
            self.targets[rows],
            per_token,
            keep,
            self.shard,
            self.rounding,
        )


@dataclass
class Rows:
    """Statistics of the rows, [N] float32 each (`entropy` only if asked for), and the tile kept for the backward.

    `extra` is what the head that made them needs again. Kept tiles are consumed by the first backward.
    """

    log_probs: Tensor
    lse: Tensor
    entropy: Tensor | None
    kept: Tensor | None
    extra: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Sinks:
    """Where gradients go; None is not wanted. `hidden` [N, H] is written, `bias` [V] float32 is added to, `weight`
    [V, H] (float32, or the layer's dtype) is written, or added to if `add`."""

    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    add: bool


class Head(ABC):
    """One way to make tiles. Use: `forward`, then at most one `backward` on the rows it returned."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem

    @abstractmethod
    def costs(self, with_entropy: bool) -> Costs:
        """What a token and a logit cost of the workspace."""

    @abstractmethod
    def forward(self, budget: Budget, with_entropy: bool) -> Rows:
        """Statistics of the rows; the tile of the budget's kept columns stays in `Rows.kept`."""

    @abstractmethod
    def row_side(
        self, rows: Rows, grad: Tensor | None, grad_entropy: Tensor | None, room: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """What the transposed tiles are multiplied with [N, H], and the factor [N] of the summed d_hidden. `room`
        [N, H] may be used for the former until `finish_hidden`."""

    @abstractmethod
    def gradient_tile(
        self,
        rows: Rows,
        columns: slice,
        tile: Tensor,
        kept: bool,
        grad: Tensor | None,
        grad_entropy: Tensor | None,
    ) -> Tensor:
        """d_logits [N, C] of some columns, up to the factor of its row, in the dtype of the weight. `tile` is the
        memory to use, which holds what `forward` left there if `kept`."""

    @abstractmethod
    def finish_hidden(self, total: Tensor, factor: Tensor | None, out: Tensor) -> Tensor:
        """`out = factor[:, None] * total` ([N, H], `total` float32)."""

    def backward(
        self, rows: Rows, budget: Budget, sinks: Sinks, grad: Tensor | None, grad_entropy: Tensor | None
    ) -> None:
        """Gradients of `(grad * log_probs + grad_entropy * entropy).sum()` into `sinks`."""
        hidden, weight = self.problem.hidden, self.problem.weight
        left, factor = self.row_side(rows, grad, grad_entropy, sinks.hidden)
        total = None if sinks.hidden is None else hidden.new_empty(hidden.shape, dtype=torch.float32)
        first_tile = True
        for columns, tile, kept in self._tiles(rows, budget):
            d_logits = self.gradient_tile(rows, columns, tile, kept, grad, grad_entropy)
            if total is not None:
                product_(total, d_logits, weight[columns], add=not first_tile)
            if sinks.weight is not None:
                product_(sinks.weight[columns], d_logits.t(), left, add=sinks.add)
            if sinks.bias is not None:
                sinks.bias[columns] += d_logits.sum(0, dtype=torch.float32)
            first_tile = False
        if total is not None:
            assert sinks.hidden is not None
            self._reduce_hidden(total, factor, sinks.hidden)

    def _reduce_hidden(self, total: Tensor, factor: Tensor | None, out: Tensor) -> None:
        group = self.problem.shard.group
        if group is None:
            self.finish_hidden(total, factor, out)
            return
        # Each process saw only its columns; the sum is the whole gradient.
        self.finish_hidden(total, factor, total)
        if total.numel():
            dist.all_reduce(total, group=group)
        out.copy_(total)

    def _tiles(self, rows: Rows, budget: Budget) -> Iterator[tuple[slice, Tensor, bool]]:
        """Kept columns first; their memory then serves the others."""
        columns = len(self.problem.weight)
        memory, kept = rows.kept, 0
        if memory is not None:
            kept = memory.shape[1]
            yield slice(0, kept), memory, True
        else:
            # As in a second backward: what the first one kept is consumed.
            memory = self.tile_memory(min(max(budget.kept, budget.tile), columns))
        rows.kept = None
        for first in range(kept, columns, memory.shape[1]):
            last = min(first + memory.shape[1], columns)
            yield slice(first, last), memory[:, : last - first], False

    @abstractmethod
    def tile_memory(self, columns: int) -> Tensor:
        """Room for a tile [N, columns], rows at multiples of 16 bytes."""
