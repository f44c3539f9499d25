"""The head whose log-probs come from a user's function (--selected-logprob-provider)."""

from __future__ import annotations

from torch import Tensor

from slime import operators
from slime.algo.selected_log_probs import (
    ContextParallelLayout,
    Pair,
    SelectedLogprobRequest,
    selected_log_probs,
)
from slime.data import kept_tokens
from slime.data.packing import MicroBatch
from slime.megatron_backend.model.gpt import logit_cap, output_weight, vocab_range
from slime.megatron_backend.step import native
from slime.megatron_backend.step.heads.head import LmHead, Values
from slime.megatron_backend.step.native import EntropyUse


class ProviderHead(LmHead):
    """Head that passes the logits of the response positions, as in the native head, and their factors to the function.

    For a model with a soft cap, it passes no hidden states, because the logits are not their product with the weight.
    """

    kind = operators.PROVIDER

    def local_log_probs(
        self, batch: MicroBatch, output: Tensor, entropy: EntropyUse, ids: Tensor | None = None
    ) -> Values:
        request = self.request(batch, output, entropy)
        log_probs, values = selected_log_probs(self.kernels, request, _native)
        return (
            log_probs[:, 0].float(),
            values if values is None else values.float(),
            self._score_ids(batch, output, ids),
        )

    def request(self, batch: MicroBatch, output: Tensor, entropy: EntropyUse) -> SelectedLogprobRequest:
        """Returns the provider's request for a micro-batch. Each context-parallel rank requests
        its own rows, whose number may be 0."""
        ranks, vocab = self.ranks, self.vocabulary()
        hidden, weight = self._hidden(batch, output), output_weight(self.model)
        logits = self._compute_logits(hidden)
        kept = kept_tokens.select_rows(batch.of_rows, batch.rows)
        multiplied = logit_cap(self.model) is None
        return SelectedLogprobRequest(
            logits=logits,
            target_ids=batch.targets,
            tensor_parallel_group=vocab["tp_group"],
            context_parallel=ContextParallelLayout(
                ranks.cp_size, ranks.cp_rank, "zigzag" if ranks.cp_size > 1 else "single"
            ),
            with_entropy=entropy != "none",
            with_entropy_grad=entropy == "loss",
            chunk_size=-1,
            log_prob_keep_mask=None
            if kept is None
            else native.make_keep_mask(kept, logits, vocab_range(self.model)[0]),
            hidden=hidden if multiplied else None,
            lm_head_weight=weight if multiplied else None,
            vocab_start_index=vocab["vocab_start"],
            global_vocab_size=len(weight) * ranks.tp_size,
            real_vocab_size=vocab["vocab_size"],
            temperature=self.temperature,
        )


def _native(
    logits: Tensor,
    target_ids: Tensor,
    tensor_parallel_group: object,
    *,
    with_entropy: bool,
    with_entropy_grad: bool,
    chunk_size: int,
    log_prob_keep_mask: Tensor | None,
) -> Pair:
    """Computes log-probs and entropy as the native head does. It overwrites the memory of `logits`, which is not read
    afterwards."""
    use: EntropyUse = "loss" if with_entropy_grad else "metric" if with_entropy else "none"
    if log_prob_keep_mask is None:
        log_probs, values = native.log_probs_and_entropy(logits, target_ids, temperature=1, entropy=use)
        return log_probs[:, None], values
    values = native.entropies(logits, temperature=1, entropy=use)
    cut = native.cut_to(logits, log_prob_keep_mask)
    log_probs, _ = native.log_probs_and_entropy(cut, target_ids, temperature=1, entropy="none")
    return log_probs[:, None], values
