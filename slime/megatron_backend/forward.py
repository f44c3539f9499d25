"""Packed tokens -> log-probability of every response token. The only place where hidden states meet the LM head.

Only response positions reach the head: hidden [T, H] -> hidden[rows] [R, H] -> rl_kernel.linear_logp. No [T, V] logits.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import tensor_parallel
from torch import Tensor

import rl_kernel
from slime.data.packing import MicroBatch
from slime.megatron_backend.attention import packed_layout
from slime.megatron_backend.model import forward_hidden, output_weight, vocab_range
from slime.megatron_backend.parallel import ParallelInfo

PADDING_LOGIT = -1e30
"""Finite, so that probability x log-probability of a padding column is 0 and not NaN."""


def response_hidden(model: Any, batch: MicroBatch) -> Tensor:
    """Hidden states that predict the response tokens: [R, H], model dtype, equal on all tensor-parallel ranks."""
    layout = packed_layout(batch.lengths, batch.tokens.device)
    return forward_hidden(model, batch.tokens, layout)[batch.rows]


def head_arguments(model: Any, info: ParallelInfo) -> dict[str, Any]:
    """The vocabulary-parallel arguments that rl_kernel's log-prob operators share."""
    vocab_start, vocab_size = vocab_range(model)
    group = info.tp_group if info.tp_size > 1 else None
    return {"tp_group": group, "vocab_start": vocab_start, "vocab_size": vocab_size}


def token_log_probs(
    model: Any, info: ParallelInfo, batch: MicroBatch, *, temperature: float
) -> tuple[Tensor, Tensor]:
    """`log_softmax(hidden @ weight.T / temperature)[target]` and the entropy of that distribution.

    Returns two fp32 tensors [R], nats, in the order of `batch.rows`; differentiable.
    """
    return rl_kernel.linear_logp(
        response_hidden(model, batch),
        output_weight(model),
        batch.targets,
        temperature=temperature,
        return_entropy=True,
        **head_arguments(model, info),
    )


def response_logits(model: Any, batch: MicroBatch) -> Tensor:
    """fp32 logits [R, V_local] of the response positions, for losses that ask for them (--custom-loss-function-path).

    Columns that only pad the vocabulary hold PADDING_LOGIT: they have no part in a softmax over the row.
    """
    hidden = tensor_parallel.copy_to_tensor_model_parallel_region(response_hidden(model, batch))
    logits = torch.nn.functional.linear(hidden.float(), output_weight(model).float())
    start, size = vocab_range(model)
    padding = torch.arange(start, start + logits.shape[-1], device=logits.device) >= size
    return logits.masked_fill(padding, PADDING_LOGIT)


@torch.no_grad()
def log_probs_of_data(
    model: Any,
    info: ParallelInfo,
    batches: list[MicroBatch],
    num_samples: int,
    response_lengths: list[int],
    *,
    temperature: float,
) -> list[Tensor]:
    """Log-probs of every sample of a rank without gradient: one fp32 tensor [response length] per sample."""
    out: list[Tensor] = [torch.empty(0)] * num_samples
    for batch in batches:
        log_probs, _ = token_log_probs(model, info, batch, temperature=temperature)
        for sample, values in zip(batch.samples, batch.split(log_probs, response_lengths), strict=True):
            out[sample] = values
    return out
