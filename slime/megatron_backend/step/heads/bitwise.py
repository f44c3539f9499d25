"""The head of --rlk-bitwise: the engine's product and log-softmax over the logits of the response tokens."""

from __future__ import annotations

import torch
from torch import Tensor

import rl_kernel.invariant as invariant
from slime import operators
from slime.data.packing import MicroBatch
from slime.megatron_backend.model.gpt import output_weight, vocab_range
from slime.megatron_backend.step.heads.head import LmHead, Values
from slime.megatron_backend.step.native import EntropyUse

_LOGITS = 2**24
"""Of one piece of tokens: the operators make copies in float64."""


class BitwiseHead(LmHead):
    """`log_softmax(linear(hidden, weight) / temperature)[target]`, in the engine's order and roundings."""

    kind = operators.BITWISE

    def local_log_probs(
        self, batch: MicroBatch, output: Tensor, entropy: EntropyUse, ids: Tensor | None = None
    ) -> Values:
        of_ids = self._of_ids(batch, output, ids)
        hidden = self._hidden(batch, output)
        weight = output_weight(self.model)[: vocab_range(self.model)[1]]
        rows = max(1, _LOGITS // len(weight))
        pieces = zip(hidden.split(rows), batch.targets.split(rows), strict=True)
        pairs = [self._of_piece(x, weight, targets, entropy) for x, targets in pieces]
        values = None if entropy == "none" else torch.cat([value for _, value in pairs])
        return torch.cat([log_probs for log_probs, _ in pairs]), values, of_ids

    def _of_piece(
        self, hidden: Tensor, weight: Tensor, targets: Tensor, entropy: EntropyUse
    ) -> tuple[Tensor, Tensor]:
        logits = invariant.linear(hidden, weight).float()
        # a tensor, as in the engine: for a number, a kernel may multiply by its inverse
        log_probs = invariant.log_softmax(logits / logits.new_full((len(logits), 1), self.temperature))
        with torch.set_grad_enabled(entropy == "loss" and torch.is_grad_enabled()):
            values = -(log_probs.exp() * log_probs).sum(-1) if entropy != "none" else log_probs[:, 0]
        return log_probs.gather(1, targets[:, None])[:, 0], values
