"""Tiles of exponentials: the head for bfloat16 on Hopper GPUs. The docstring of `kernels` explains the method.

The head needs tensor maps (compute capability 9). `refusal` returns the reason why inputs need `PlainHead` instead.
Without an entropy gradient, no kernel reads [N, V] values between the matrix products.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import torch
import torch.distributed as dist
import triton
from torch import Tensor

from rl_kernel.collectives import gather_stack
from rl_kernel.dispatch import interpreted
from rl_kernel.ops.linear_logp import kernels
from rl_kernel.ops.linear_logp.head import HeadProblem, Rows, VocabularyHead
from rl_kernel.ops.linear_logp.plan import Budget, Costs
from rl_kernel.ops.logp.kernels import merge

ALIGNMENT = 8
"""Alignment in elements: tensor maps need rows at multiples of 16 bytes."""
ROWS_PER_PROGRAM = 32
ENTROPY_BLOCK, ENTROPY_HIDDEN_BLOCK = 2048, 256
ROW_VECTORS = 64
"""Bytes per token for statistics, factors and gradients of rows together."""


def refusal(problem: HeadProblem) -> str | None:
    """Returns the reason why these inputs need `PlainHead`, or None if they do not."""
    if problem.weight.dtype != torch.bfloat16:
        return "it is for bfloat16"
    if problem.task.rounding not in (None, torch.bfloat16):
        return "it rounds logits to bfloat16 or not at all"
    task = problem.task
    if problem.bias is not None or task.keep is not None or task.ids is not None or task.top:
        return "it takes neither a bias nor kept tokens nor ids"
    if task.cap is not None:
        return "it takes no soft cap"
    if problem.hidden.shape[1] % ALIGNMENT or not (readable(problem.hidden) and readable(problem.weight)):
        return "rows must be contiguous and start at multiples of 16 bytes"
    if not (interpreted() or _has_tensor_maps(problem.hidden.device)):
        return "it is tuned and tested on compute capability 9.0"
    return None


def readable(rows: Tensor) -> bool:
    """Returns whether the kernels can read these rows without a copy. This is also True for a width that is not a
    multiple of ALIGNMENT, because the kernels never read such rows."""
    aligned = rows.stride(0) % ALIGNMENT == 0 and rows.data_ptr() % 16 == 0
    return rows.stride(1) == 1 and (aligned or rows.shape[1] % ALIGNMENT != 0)


@dataclass(frozen=True)
class TilePart:
    """Consecutive columns of the product: the tensor maps, the output for the row sums of its blocks, the number of
    columns that are not padding, and whether the tile is stored."""

    maps: kernels.TensorMaps
    sums: Tensor
    real: int
    store: bool


@cache
def _has_tensor_maps(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


class ExpHead(VocabularyHead):
    """Head whose tile holds exp(z - center). For the backward, the entry at the target is replaced. A factor per row
    turns the tile into the gradient."""

    def costs(self, with_entropy: bool) -> Costs:
        # The forward holds block sums, the backward the float32 sum of d_hidden; they are never in memory together.
        blocks = -(-len(self.problem.weight) // kernels.BLOCK_COLUMNS) + 1
        return Costs(
            max(self.problem.hidden.shape[1], blocks * (1 + with_entropy)) * 4 + ROW_VECTORS, 2, scratch=False
        )

    def forward(self, budget: Budget, with_entropy: bool) -> Rows:
        problem = self.problem
        tokens, columns = len(problem.hidden), len(problem.weight)
        rows = self._centers()
        kept = budget.kept
        tile = self.tile_memory(kept) if kept else None
        blocks = -(-kept // kernels.BLOCK_COLUMNS) + -(-(columns - kept) // kernels.BLOCK_COLUMNS)
        sums = rows["scale"].new_empty(1 + with_entropy, blocks, tokens)
        stats = rows["scale"].new_empty(3 + with_entropy, tokens)
        parts = list(self._parts(kept, tile, sums))
        self._multiply(parts, rows)
        self._sum_blocks(rows, sums, stats)
        # The following launches do nothing unless the sum of a row overflowed, see `kernels`.
        self._multiply(parts, rows, conditional=True, maximum=True)
        self._raise_centers(rows, sums, stats)
        self._multiply(parts, rows, conditional=True)
        self._sum_blocks(rows, sums, stats, conditional=True)
        log_probs, lse, entropy = merge(gather_stack(stats, self.task.shard.group))
        # The kernels sum the target's logit in another order than the row's logits, so that p may exceed 1.
        log_probs.clamp_(max=0)
        extra = {"scale": rows["scale"], "center": rows["center"]}
        return Rows(log_probs, lse, entropy, tile, extra=extra)

    def row_side(
        self, rows: Rows, grad: Tensor | None, grad_entropy: Tensor | None, scratch: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        hidden = self.problem.hidden
        if grad_entropy is not None:
            return hidden, None
        assert grad is not None
        scaled = hidden.new_empty(hidden.shape) if scratch is None else scratch
        factor = torch.empty_like(rows.lse)
        tokens, width = hidden.shape
        if tokens:
            kernels._row_factors_kernel[(tokens,)](
                hidden, grad, rows.extra["scale"], rows.extra["center"], rows.lse, factor, scaled, width,
                hidden.stride(0), BLOCK=kernels.hidden_block(width),
            )  # fmt: skip
        return scaled, factor

    def gradient_tile(
        self,
        rows: Rows,
        columns: slice,
        tile: Tensor,
        kept: bool,
        grad: Tensor | None,
        grad_entropy: Tensor | None,
    ) -> Tensor:
        problem = self.problem
        tokens, width = tile.shape
        if tokens == 0:
            return tile
        shard = self.task.shard.tile(columns)
        if not kept:
            maps = kernels.descriptors(problem.hidden, problem.weight[columns], tile)
            rounding = self.task.rounding is not None
            kernels.launch_exp_product(maps, rows.extra, None, shard.real, store=True, rounding=rounding)
        where = tokens, tile.stride(0), shard.start, shard.real
        blocks = (triton.cdiv(tokens, ROWS_PER_PROGRAM),)
        center, scale = rows.extra["center"], rows.extra["scale"]
        if grad_entropy is None:
            kernels._target_entries_kernel[blocks](
                tile, self.task.targets, rows.log_probs, center, rows.lse, *where, BLOCK=ROWS_PER_PROGRAM
            )
            return tile
        has_grad = grad is not None
        upstream = grad if has_grad else grad_entropy, grad_entropy, scale
        hidden, weight = problem.hidden, problem.weight[columns]
        kernels._entropy_gradient_kernel[(tokens, triton.cdiv(width, ENTROPY_BLOCK))](
            tile, hidden, weight, *upstream, center, rows.lse, rows.entropy, width, hidden.shape[1], tile.stride(0),
            hidden.stride(0), weight.stride(0), HAS_GRAD=has_grad, ROUND=self.task.rounding is not None,
            BLOCK=ENTROPY_BLOCK, BLOCK_H=ENTROPY_HIDDEN_BLOCK, num_warps=8,
        )  # fmt: skip
        kernels._entropy_target_entries_kernel[blocks](
            tile, self.task.targets, *upstream, rows.log_probs, rows.entropy, *where, HAS_GRAD=has_grad,
            BLOCK=ROWS_PER_PROGRAM,
        )  # fmt: skip
        return tile

    def finish_hidden(self, total: Tensor, factor: Tensor | None, out: Tensor) -> Tensor:
        tokens, width = total.shape
        if tokens:
            kernels._scale_rows_kernel[(tokens,)](
                total, factor, out, width, out.stride(0), HAS_FACTOR=factor is not None,
                BLOCK=kernels.hidden_block(width),
            )  # fmt: skip
        return out

    def tile_memory(self, columns: int) -> Tensor:
        pitch = -(-columns // ALIGNMENT) * ALIGNMENT
        return self.problem.hidden.new_empty(len(self.problem.hidden), pitch)[:, :columns]

    def _centers(self) -> dict[str, Tensor]:
        problem = self.problem
        hidden, weight, shard = problem.hidden, problem.weight, self.task.shard
        tokens, width = hidden.shape
        scale, center = hidden.new_empty(2, tokens, dtype=torch.float32)
        rows = {"scale": scale, "center": center, "flag": hidden.new_empty(1, dtype=torch.int32)}
        if tokens:
            kernels._centers_kernel[(tokens,)](
                hidden, weight, self.task.targets, self.task.temperature, rows["scale"], rows["center"], rows["flag"],
                width, hidden.stride(0), weight.stride(0), shard.start, shard.real,
                PER_TOKEN=isinstance(self.task.temperature, Tensor), ROUND=self.task.rounding is not None,
                BLOCK=kernels.hidden_block(width),
            )  # fmt: skip
        if shard.group is not None and tokens:
            # The process that owns the target has its logit; the other processes have 0.
            dist.all_reduce(rows["center"], group=shard.group)
        return rows

    def _parts(self, kept: int, tile: Tensor | None, sums: Tensor) -> Iterator[TilePart]:
        """Yields all columns in up to two parts: the tile of the kept columns is stored; for the others only the sums
        are stored."""
        problem = self.problem
        split = -(-kept // kernels.BLOCK_COLUMNS)
        for columns, out, part in (
            (slice(0, kept), tile, sums[:, :split]),
            (slice(kept, len(problem.weight)), None, sums[:, split:]),
        ):
            if columns.stop > columns.start and len(problem.hidden):
                shard = self.task.shard.tile(columns)
                maps = kernels.descriptors(problem.hidden, problem.weight[columns], out)
                yield TilePart(maps, part, shard.real, out is not None)

    def _multiply(
        self,
        parts: list[TilePart],
        rows: dict[str, Tensor],
        *,
        conditional: bool = False,
        maximum: bool = False,
    ) -> None:
        for part in parts:
            kernels.launch_exp_product(
                part.maps, rows, part.sums, part.real, store=part.store, rounding=self.task.rounding is not None,
                conditional=conditional, maximum=maximum,
            )  # fmt: skip

    def _sum_blocks(
        self, rows: dict[str, Tensor], sums: Tensor, stats: Tensor, *, conditional: bool = False
    ) -> None:
        tokens, shard = stats.shape[1], self.task.shard
        if tokens:
            kernels._block_sums_kernel[(triton.cdiv(tokens, ROWS_PER_PROGRAM),)](
                sums[0], sums[-1], rows["center"], self.task.targets, stats, rows["flag"], tokens,
                sums.shape[1], shard.start, shard.real, shard.limit, CONDITIONAL=conditional,
                ENTROPY=len(sums) == 2, BLOCK=ROWS_PER_PROGRAM, STEP=32,
            )  # fmt: skip

    def _raise_centers(self, rows: dict[str, Tensor], sums: Tensor, stats: Tensor) -> None:
        tokens = stats.shape[1]
        if tokens:
            kernels._raise_centers_kernel[(triton.cdiv(tokens, ROWS_PER_PROGRAM),)](
                sums[0],
                rows["center"],
                stats,
                rows["flag"],
                tokens,
                sums.shape[1],
                BLOCK=ROWS_PER_PROGRAM,
                STEP=32,
            )
