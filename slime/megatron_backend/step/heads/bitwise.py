"""The head of --rlk-bitwise: the engine's product and log-softmax over the logits of the response tokens."""

from __future__ import annotations

import torch
from torch import Tensor

import rl_kernel.invariant as invariant
from slime import operators
from slime.data.packing import MicroBatch
from slime.megatron_backend.model.gpt import output_weight, vocab_range
from slime.megatron_backend.step.heads.head import LinearHead, Values
from slime.megatron_backend.step.native import EntropyUse

_BYTES = {"cpu": 64, "cuda": 10}
"""Of a logit in all copies of a piece of rows: in float64 on a host, in bfloat16 and float32 on a GPU."""


class BitwiseHead(LinearHead):
    """`log_softmax(linear(hidden, weight) / temperature)[target]`, in the engine's order and roundings. Gradients and
    entropies are those of rl_kernel.linear_logp."""

    kind = operators.BITWISE

    def local_log_probs(
        self, batch: MicroBatch, output: Tensor, entropy: EntropyUse, ids: Tensor | None = None
    ) -> Values:
        value = self._value(self._hidden(batch, output), batch.targets)
        if not torch.is_grad_enabled() and entropy == "none" and ids is None:
            return value, None, None
        plain, values, of_ids = super().local_log_probs(batch, output, entropy, ids)
        return invariant.with_value(plain, value), values, of_ids

    @torch.no_grad()
    def _value(self, hidden: Tensor, targets: Tensor) -> Tensor:
        weight = output_weight(self.model)[: vocab_range(self.model)[1]]
        rows = max(1, self.workspace_bytes // (_BYTES[hidden.device.type] * len(weight)))
        pieces = zip(hidden.split(rows), targets.split(rows), strict=True)
        return torch.cat([self._of_piece(x, weight, ids) for x, ids in pieces])

    def _of_piece(self, hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        logits = invariant.linear(hidden, weight).float()
        # a tensor, as in the engine: for a number, a kernel may multiply by its inverse
        logits /= logits.new_full((len(logits), 1), self.temperature)
        return invariant.target_log_probs(logits, targets)
