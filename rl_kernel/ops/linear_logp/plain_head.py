"""Tiles of logits: the head for every dtype, for a bias, for kept tokens, and for GPUs without tensor maps.

cuBLAS writes the logits of a tile. One kernel reads them for the statistics, another kernel replaces them by their
gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rl_kernel.collectives import gather_stack
from rl_kernel.gemm import product_
from rl_kernel.ops.linear_logp.head import HeadProblem, Rows, VocabularyHead
from rl_kernel.ops.linear_logp.plan import Budget, Costs
from rl_kernel.ops.logp.id_kernels import as_kept, ids_logits_grad
from rl_kernel.ops.logp.kept_kernels import kept_logits_grad, merge_kept, no_logits, pick_
from rl_kernel.ops.logp.kernels import logits_grad, merge, row_stats
from rl_kernel.token_ids import largest, top_keys
from rl_kernel.vocab import VocabShard, capped, combined

ALIGNMENT = 16
"""Alignment in elements. cuBLAS uses its fast kernels if rows start at multiples of 16 bytes; this alignment is enough
in every dtype."""
ROW_VECTORS = 512
"""Bytes per token for the statistics of row and tiles, and the gradients of rows."""
ID_BYTES = 16
"""Bytes per id for its logit, its log-prob and two gradients, float32."""
TOP_BYTES = 32
"""Bytes per logit, and per id in the result: a float32, its sortable int64, and the copies that the selection makes."""


class PlainHead(VocabularyHead):
    """Head whose tile holds logits before the temperature. `gradient_tile` works in place if the dtypes agree."""

    def __init__(self, problem: HeadProblem) -> None:
        super().__init__(problem)
        weight = problem.weight
        # cuBLAS rounds its result to the weight's dtype; the row kernels do every other rounding.
        rounds = problem.task.rounding == weight.dtype and problem.bias is None
        self.logits_dtype = weight.dtype if rounds else torch.float32
        self.inverse = 1 / problem.task.temperature

    def costs(self, with_entropy: bool) -> Costs:
        dtype = self.problem.weight.dtype
        in_place = self.logits_dtype == dtype
        element = self.logits_dtype.itemsize + (0 if in_place else dtype.itemsize)
        row = self.problem.hidden.shape[1] * 4 + ROW_VECTORS
        if self.task.ids is not None:
            row += ID_BYTES * self.task.ids.shape[1]
        if self.task.top:
            row, element = row + TOP_BYTES * self.task.top, element + TOP_BYTES
        return Costs(row, element, scratch=True)

    def forward(self, budget: Budget, with_entropy: bool) -> Rows:
        problem, keep = self.problem, self.task.keep
        columns = len(problem.weight)
        kept = self.tile_memory(budget.kept) if budget.kept else None
        through = self.tile_memory(min(budget.tile, columns - budget.kept))
        starts = [0] * (kept is not None) + list(range(budget.kept, columns, max(through.shape[1], 1)))
        parts = problem.hidden.new_empty(
            len(starts), 3 + with_entropy, len(problem.hidden), dtype=torch.float32
        )
        asked = keep if self.task.ids is None else as_kept(self.task.ids)
        picked, keys = None if asked is None else no_logits(asked, parts), None
        for part, first in zip(parts, starts, strict=True):
            memory = kept if kept is not None and first == 0 else through
            tile = slice(first, min(first + memory.shape[1], columns))
            logits = self._logits(tile, memory[:, : tile.stop - tile.start])
            shard = self.task.shard.tile(tile)
            row_stats(
                logits,
                self.task.targets,
                self.inverse,
                shard,
                with_entropy,
                self.task.rounding,
                out=part,
                cap=self.task.cap,
            )
            if asked is not None and picked is not None:
                pick_(picked, logits, asked, self.inverse, shard, self.task.rounding, self.task.cap)
            if self.task.top:
                keys = top_keys(self._scaled(logits, shard), shard, self.task.top, keys)
        if keep is not None and picked is not None:
            merged = merge_kept(parts, picked, keep, self.task.targets, self.task.shard)
            return Rows(*merged[:3], kept, extra={"whole_lse": merged[3], "kept_logits": picked})
        if self.task.shard.group is not None:
            # Processes may have different numbers of tiles, so each process contributes one part to the gather.
            parts = gather_stack(combined(parts), self.task.shard.group)
        rows = Rows(*merge(parts), kept)
        if picked is not None and self.task.ids is not None:
            rows.extra["ids_logits"] = largest(picked.view(self.task.ids.shape), self.task.shard.group)
            rows.id_log_probs = rows.extra["ids_logits"] - rows.lse[:, None]
        if keys is not None:
            rows.extra["top_keys"] = keys
        return rows

    def row_side(
        self, rows: Rows, grad: Tensor | None, grad_entropy: Tensor | None, scratch: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        return self.problem.hidden, None

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
        logits = tile if kept else self._logits(columns, tile)
        dtype = problem.weight.dtype
        out = logits if logits.dtype == dtype else torch.empty_like(logits, dtype=dtype)
        shard = self.task.shard.tile(columns)
        if (grad_ids := rows.extra.get("grad_ids")) is not None and self.task.ids is not None:
            assert grad is not None
            return ids_logits_grad(
                logits, rows.extra["ids_logits"], self.task.ids, self.task.targets, rows.log_probs, rows.lse,
                rows.entropy, shard, grad, grad_ids, grad_entropy, self.inverse, out, self.task.rounding,
                self.task.cap,
            )  # fmt: skip
        if self.task.keep is not None:
            return kept_logits_grad(
                logits, rows.extra["kept_logits"], self.task.keep, self.task.targets, rows.lse, rows.extra["whole_lse"],
                rows.entropy, shard, grad, grad_entropy, self.inverse, out, self.task.rounding, self.task.cap,
            )  # fmt: skip
        return logits_grad(
            logits, self.task.targets, rows.lse, rows.entropy, shard, grad, grad_entropy, self.inverse, out,
            self.task.rounding, self.task.cap,
        )  # fmt: skip

    def finish_hidden(self, total: Tensor, factor: Tensor | None, out: Tensor) -> Tensor:
        return out if out is total else out.copy_(total)

    def tile_memory(self, columns: int) -> Tensor:
        pitch = -(-columns // ALIGNMENT) * ALIGNMENT
        shape = len(self.problem.hidden), pitch
        return self.problem.hidden.new_empty(shape, dtype=self.logits_dtype)[:, :columns]

    def _scaled(self, logits: Tensor, shard: VocabShard) -> Tensor:
        """Returns a tile of logits without padding [C, real] float32: rounded, capped, divided by the temperature."""
        rounding = self.task.rounding
        real = logits[:, : shard.real]
        real = real if rounding is None else real.to(rounding)
        inverse = self.inverse[:, None] if isinstance(self.inverse, Tensor) else self.inverse
        return capped(real, self.task.cap).float() * inverse

    def _logits(self, columns: slice, out: Tensor) -> Tensor:
        problem = self.problem
        product_(out, problem.hidden, problem.weight[columns].t())
        if problem.bias is not None:
            out += problem.bias[columns]
        return out
