"""Packed tokens -> log-probability of every response token. The only place where hidden states meet the LM head.

Only response positions reach the head: hidden [T, H] -> hidden[rows] [R, H] -> rl_kernel, or logits [R, V] for losses
that ask for them and for --rl-kernel-ops without the linear operators. Logits [T, V] are the native path's alone.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import tensor_parallel
from torch import Tensor

import rl_kernel
from slime.data.packing import MicroBatch
from slime.megatron_backend import native
from slime.megatron_backend.attention import packed_layout
from slime.megatron_backend.model import forward_hidden, forward_logits, output_weight, vocab_range
from slime.megatron_backend.parallel import ParallelInfo
from slime.operators import Head


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
    model: Any,
    info: ParallelInfo,
    batch: MicroBatch,
    head: Head,
    *,
    temperature: float,
    entropy: native.EntropyUse,
    workspace_bytes: int,
) -> tuple[Tensor, Tensor | None]:
    """`log_softmax(hidden @ weight.T / temperature)[target]` and, if asked, the entropy of that distribution.

    Returns fp32 tensors [R], nats, in the order of `batch.rows`; differentiable. `head` is not linear_token_loss.
    """
    if head == "native":
        layout = packed_layout(batch.lengths, batch.tokens.device)
        logits = forward_logits(model, batch.tokens, layout)[batch.rows].float()
        logits = native.mask_padding(logits, *vocab_range(model))
        return native.log_probs_and_entropy(logits, batch.targets, temperature=temperature, entropy=entropy)
    shared = {"temperature": temperature, "return_entropy": entropy != "none", **head_arguments(model, info)}
    if head == "linear_logp":
        layer = response_hidden(model, batch), output_weight(model)
        out = rl_kernel.linear_logp(*layer, batch.targets, workspace_bytes=workspace_bytes, **shared)
    else:
        out = rl_kernel.logp(response_logits(model, batch), batch.targets, **shared)
    return out if entropy != "none" else (out, None)


def response_logits(model: Any, batch: MicroBatch) -> Tensor:
    """Logits [R, V_local] of the response positions in the model's dtype, padding columns too: no prompt token and no
    padding reaches the head."""
    hidden = tensor_parallel.copy_to_tensor_model_parallel_region(response_hidden(model, batch))
    return torch.nn.functional.linear(hidden, output_weight(model))


@torch.no_grad()
def log_probs_of_data(
    model: Any,
    info: ParallelInfo,
    batches: list[MicroBatch],
    num_samples: int,
    response_lengths: list[int],
    head: Head,
    *,
    temperature: float,
    workspace_bytes: int,
) -> list[Tensor]:
    """Log-probs of every sample of a rank without gradient: one fp32 tensor [response length] per sample."""
    out: list[Tensor] = [torch.empty(0)] * num_samples
    for batch in batches:
        log_probs, _ = token_log_probs(
            model,
            info,
            batch,
            head,
            temperature=temperature,
            entropy="none",
            workspace_bytes=workspace_bytes,
        )
        for sample, values in zip(batch.samples, batch.split(log_probs, response_lengths), strict=True):
            out[sample] = values
    return out
