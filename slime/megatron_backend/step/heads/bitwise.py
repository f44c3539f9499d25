"""The head of --rlk-bitwise: the engine's product and log-softmax over the logits of the response tokens."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

import rl_kernel.invariant as invariant
from rl_kernel.collectives import gather_stack
from slime import operators
from slime.data.packing import MicroBatch
from slime.megatron_backend.model.gpt import output_weight, vocab_range
from slime.megatron_backend.step.heads.head import LinearHead, OnePassHead, Values
from slime.megatron_backend.step.native import EntropyUse

_BYTES = {"cpu": 64, "cuda": 10}
"""Bytes per logit in all copies of a piece of rows: in float64 on a host, in bfloat16 and float32 on a GPU."""


class BitwiseHead(LinearHead):
    """Head that computes `log_softmax(linear(hidden, weight) / temperature)[target]` in the engine's order and
    roundings. Gradients and entropies come from rl_kernel.linear_logp."""

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
        ranks, vocabulary = self.ranks.tp_size, vocab_range(self.model)[1]
        rows = max(1, self.workspace_bytes // (_BYTES[hidden.device.type] * vocabulary)) * ranks
        pieces = zip(hidden.split(rows), targets.split(rows), strict=True)
        return torch.cat([self._score_piece(x, ids) for x, ids in pieces])

    def _score_piece(self, hidden: Tensor, targets: Tensor) -> Tensor:
        logits, targets = self._whole_logits(hidden, targets)
        if self.temperature != 1:  # a quotient by 1 has the bits of its dividend
            # a tensor, as in the engine: for a number, a kernel may multiply by its inverse
            temperatures = logits.new_full((len(logits), 1), self.temperature, dtype=torch.float32)
            logits = logits / temperatures  # in float32
        log_probs = invariant.target_log_probs(logits, targets)
        if self.ranks.tp_size == 1:
            return log_probs
        return gather_stack(log_probs, self.ranks.tp_group).flatten()[: len(hidden)]

    def _whole_logits(self, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the logits over all columns, and the targets, for this rank's part of the rows: [rows / TP, V] and
        [rows / TP]. The last parts may have rows of padding. Collective over tensor-parallel ranks."""
        ranks, vocabulary = self.ranks.tp_size, vocab_range(self.model)[1]
        if ranks == 1:
            return invariant.linear(hidden, output_weight(self.model)[:vocabulary]), targets
        missing = -len(hidden) % ranks
        hidden, targets = pad(hidden, (0, 0, 0, missing)), pad(targets, (0, missing))
        logits = invariant.linear(hidden, output_weight(self.model))
        logits = invariant.own_rows(logits, self.ranks.tp_group).transpose(0, 1).flatten(1)
        return logits[:, :vocabulary], targets.tensor_split(ranks)[self.ranks.tp_rank]


class BitwiseOnePassHead(BitwiseHead, OnePassHead):
    """Head whose objective gets the log-probs of `BitwiseHead`. Gradients and entropies come from
    rl_kernel.linear_token_loss."""

    kind = operators.BITWISE_ONE_PASS

    def _exact_log_probs(self, hidden: Tensor, targets: Tensor) -> Tensor:
        return self._value(hidden, targets)
