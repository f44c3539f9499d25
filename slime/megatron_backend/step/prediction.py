"""The loss of multi-token prediction (DeepSeek-V3, 2412.19437): layers after the decoder predict further tokens.

Depth k computes `layer_k(product(cat(norm(embedding of token t + k), norm(state of token t))))`. The state is the
decoder's state, and from depth 2 on the state of depth k - 1. From the result, the model's head computes log-probs of
token t + k + 1.

The loss trains only these layers. The decoder's output, the embedding and the head are constants in this loss, as in
slime, so that the policy has the same gradients with and without it.
Shapes: P rows, H hidden, R response tokens of the micro-batch, r response tokens of this rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import scatter_to_sequence_parallel_region
from torch import Tensor
from torch.nn.functional import pad

import rl_kernel
from slime.algo.importance import weighted
from slime.data.ahead import look_ahead, unshared
from slime.data.packing import MicroBatch
from slime.data.token_slice import TokenSlice
from slime.megatron_backend.model.attention import packed_layout
from slime.megatron_backend.model.gpt import HiddenGPTModel, gather_hidden, last_part, output_weight
from slime.megatron_backend.model.moe.expert_dispatch import share_longest
from slime.megatron_backend.model.rows import GatheredRows, take
from slime.megatron_backend.step.heads.head import LmHead


@dataclass(frozen=True)
class Predictions:
    """Multi-token prediction of a run. `factor` is --mtp-loss-scaling-factor. `head` is the policy's head, with its
    model, ranks and workspace."""

    head: LmHead
    factor: float

    def loss(self, batch: MicroBatch, output: Tensor) -> tuple[Tensor, Tensor]:
        """Returns (loss, metric) from the last stage's `output`, as parts of the step's sums over `LmHead.loss_group`.

        The metric is `mean over depths of -(log_probs * loss_masks / loss_denominators).sum()`, over the response
        tokens that the depth predicts, with log-probs at temperature 1. The loss is `factor` times the metric.
        Collective over the ranks that share the row.
        """
        inner, ranks = last_part(self.head.model), self.head.ranks
        core = inner.config
        multiple = core.tensor_model_parallel_size if core.sequence_parallel else 1
        part = unshared(batch.part, multiple)
        layout = packed_layout(part, output.device, ranks.cp_group)
        layout.rotary = inner.rotary(layout.positions)
        share_longest(layout, core)
        state = _constant_state(inner, batch, part, output)
        weights = batch.columns["loss_masks"] / batch.columns["loss_denominators"]
        total = torch.zeros((), device=output.device)
        for depth, layer in enumerate(inner.mtp.layers, 1):
            ahead = look_ahead(batch, part, depth)
            state = layer(
                input_ids=ahead.tokens.to(output.device)[None],
                position_ids=None,
                hidden_states=state,
                attention_mask=None,
                packed_seq_params=layout,
                embedding=inner.embedding,
            )[0]
            hidden = gather_hidden(inner, state)
            hidden = take(hidden, GatheredRows.of(ahead.rows.to(output.device), len(hidden)))
            of_response = ahead.of_response.to(output.device)
            total = total + self._summed(hidden, ahead.targets.to(output.device), weights[of_response])
        mean = total / len(inner.mtp.layers)
        metric = mean.detach().clone()
        if ranks.cp_size > 1 and self.head.loss_group is not ranks.dp_cp_group:
            dist.all_reduce(metric, group=ranks.cp_group)  # each rank has only its own tokens
        return self.factor * mean, metric

    def _summed(self, hidden: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
        """Returns `-(log_probs * weights).sum()` of the head's log-probs of `targets` [r], without logits."""
        return rl_kernel.linear_token_loss(
            hidden,
            output_weight(self.head.model).detach(),
            targets,
            lambda log_probs, _, rows: (-weighted(log_probs, weights[rows]).sum(), {}),
            workspace_bytes=self.head.workspace_bytes,
            **self.head.vocabulary(),
        ).loss


def _constant_state(inner: HiddenGPTModel, batch: MicroBatch, part: TokenSlice, output: Tensor) -> Tensor:
    """Returns the decoder's output [P, 1, H] (or this rank's part with sequence parallelism) in the rows of `part`, as
    a leaf, because recomputed layers need an input with a gradient."""
    state = output.detach()
    if part is not batch.part:
        state = gather_hidden(inner, state)[batch.part.gathered.to(output.device)]
        state = pad(state, (0, 0, 0, part.rows - len(state)))[:, None]
        if inner.config.sequence_parallel:
            state = scatter_to_sequence_parallel_region(state)
    return state.clone().requires_grad_()
