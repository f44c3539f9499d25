"""The output layer on a device: row statistics and gradients of `hidden @ weight.T`, column tile by column tile.

`VocabularyHead` owns the parts that its two subclasses share: the columns that are kept for the backward, the sums of
the three gradients, and the sums over a split vocabulary. `ExpHead` (exponentials directly from the product) and
`PlainHead` (logits, then row kernels) compute one tile. `linear_logp` and `linear_token_loss` call them. No function
here copies a value to the host.

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
from rl_kernel.ops.linear_logp.arguments import Task
from rl_kernel.ops.linear_logp.plan import Budget, Costs
from rl_kernel.token_ids import with_ids


@dataclass(frozen=True)
class HeadProblem:
    """A layer and the task of a call, or of a block of the call's tokens. hidden [N, H], weight [V, H], bias [V]."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    task: Task

    def rows(self, rows: slice) -> HeadProblem:
        """Returns the same layer for the tokens in `rows`."""
        return HeadProblem(self.hidden[rows], self.weight, self.bias, self.task.rows(rows))


@dataclass
class Rows:
    """Statistics of the rows, [N] float32 each, and the tile that is kept for the backward. `entropy` and the ids'
    log-probs `id_log_probs` [N, K] are None unless requested.

    `extra` holds further tensors for the backward of the same head. The first backward overwrites the kept tile.
    """

    log_probs: Tensor
    lse: Tensor
    entropy: Tensor | None
    kept: Tensor | None
    id_log_probs: Tensor | None = None
    extra: dict[str, Tensor] = field(default_factory=dict)

    def upstream(self, grad: Tensor | None, grad_ids: Tensor | None, task: Task) -> Tensor | None:
        """Stores the upstream gradient [N, K] of the ids' log-probs for `gradient_tile`. Returns the gradient [N] that
        all columns get for the target and the ids together."""
        grad, grad_ids = with_ids(grad, grad_ids, task.ids, task.shard)
        if grad_ids is not None:
            self.extra["grad_ids"] = grad_ids.contiguous()
        return grad


@dataclass(frozen=True)
class Sinks:
    """Tensors that receive the gradients; None for an input without a gradient.

    The backward writes `hidden` [N, H] and adds to `bias` [V] float32. It writes `weight` [V, H] (float32, or the
    layer's dtype), or adds to it if `add`.
    """

    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    add: bool


class VocabularyHead(ABC):
    """Base class of the two ways to compute tiles. Call `forward`, then `backward` at most once on the rows that
    `forward` returned."""

    def __init__(self, problem: HeadProblem) -> None:
        self.problem, self.task = problem, problem.task

    @abstractmethod
    def costs(self, with_entropy: bool) -> Costs:
        """Returns the bytes of workspace per token and per logit."""

    @abstractmethod
    def forward(self, budget: Budget, with_entropy: bool) -> Rows:
        """Returns the statistics of the rows. `Rows.kept` holds the tile of the columns that the budget keeps."""

    @abstractmethod
    def row_side(
        self, rows: Rows, grad: Tensor | None, grad_entropy: Tensor | None, scratch: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Returns the right factor [N, H] of the products `tile.T @ ...` for the weight gradient, and the factor [N]
        that multiplies the rows of the summed d_hidden. The first may use the memory `scratch` [N, H] until
        `finish_hidden`."""

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
        """Returns d_logits [N, C] of `columns`, each row divided by its factor, in the dtype of the weight. `tile` is
        the memory to use; if `kept`, it holds the values that `forward` wrote."""

    @abstractmethod
    def finish_hidden(self, total: Tensor, factor: Tensor | None, out: Tensor) -> Tensor:
        """Computes `out = factor[:, None] * total` ([N, H], `total` float32)."""

    def backward(
        self, rows: Rows, budget: Budget, sinks: Sinks, grad: Tensor | None, grad_entropy: Tensor | None
    ) -> None:
        """Computes the gradients of `(grad * log_probs + grad_entropy * entropy).sum()` into `sinks`. With ids, `grad`
        is the result of `Rows.upstream`."""
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
        group = self.task.shard.group
        if group is None:
            self.finish_hidden(total, factor, out)
            return
        # Each process has the part that belongs to its own columns; the sum is the whole gradient.
        self.finish_hidden(total, factor, total)
        if total.numel():
            dist.all_reduce(total, group=group)
        out.copy_(total)

    def _tiles(self, rows: Rows, budget: Budget) -> Iterator[tuple[slice, Tensor, bool]]:
        """Yields (columns, memory, whether it is kept): first the kept columns, then the others in the same memory."""
        columns = len(self.problem.weight)
        memory, kept = rows.kept, 0
        if memory is not None:
            kept = memory.shape[1]
            yield slice(0, kept), memory, True
        else:
            # No columns were kept, or an earlier backward has used them.
            memory = self.tile_memory(min(max(budget.kept, budget.tile), columns))
        rows.kept = None
        for first in range(kept, columns, memory.shape[1]):
            last = min(first + memory.shape[1], columns)
            yield slice(first, last), memory[:, : last - first], False

    @abstractmethod
    def tile_memory(self, columns: int) -> Tensor:
        """Returns memory for a tile [N, columns]. Its rows start at multiples of 16 bytes."""
