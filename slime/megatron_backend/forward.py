"""The last stage's output -> log-probability of every response token. The only place where hidden states meet the LM
head.

Only response positions reach the head: hidden [P, H] -> hidden[rows] [r, H] -> rl_kernel, or logits [r, V] for losses
that ask for them and for --rl-kernel-ops without the linear operators. Logits [P, V] are the native path's alone.
r response tokens are this context-parallel rank's, R all of the micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import tensor_parallel
from torch import Tensor

import rl_kernel
from slime.data.packing import MicroBatch
from slime.megatron_backend import native
from slime.megatron_backend.model import hidden_of, logits_of, output_weight, vocab_range
from slime.megatron_backend.parallel import ParallelInfo
from slime.megatron_backend.pipeline import run_forward, tensors_from_last_stage
from slime.operators import Head


def response_hidden(model: Any, batch: MicroBatch, output: Tensor) -> Tensor:
    """Hidden states that predict the response tokens: [r, H], model dtype, equal on all tensor-parallel ranks."""
    return hidden_of(model, output)[batch.rows]


def head_arguments(model: Any, info: ParallelInfo) -> dict[str, Any]:
    """The vocabulary-parallel arguments that rl_kernel's log-prob operators share."""
    vocab_start, vocab_size = vocab_range(model)
    group = info.tp_group if info.tp_size > 1 else None
    return {"tp_group": group, "vocab_start": vocab_start, "vocab_size": vocab_size}


def token_log_probs(
    model: Any,
    info: ParallelInfo,
    batch: MicroBatch,
    output: Tensor,
    head: Head,
    *,
    temperature: float,
    entropy: native.EntropyUse,
    workspace_bytes: int,
) -> tuple[Tensor, Tensor | None]:
    """`log_softmax(hidden @ weight.T / temperature)[target]` and, if asked, the entropy of that distribution.

    Returns fp32 tensors [R], nats, of all response tokens in the order of the samples, equal on all tensor- and
    context-parallel ranks; differentiable as `whole` says. `head` is not linear_token_loss.
    """
    if head == "native":
        logits = logits_of(model, output)[batch.rows].float()
        logits = native.mask_padding(logits, *vocab_range(model))
        log_probs, values = native.log_probs_and_entropy(
            logits, batch.targets, temperature=temperature, entropy=entropy
        )
    else:
        shared = {
            "temperature": temperature,
            "return_entropy": entropy != "none",
            **head_arguments(model, info),
        }
        if head == "linear_logp":
            layer = response_hidden(model, batch, output), output_weight(model)
            out = rl_kernel.linear_logp(*layer, batch.targets, workspace_bytes=workspace_bytes, **shared)
        else:
            out = rl_kernel.logp(response_logits(model, batch, output), batch.targets, **shared)
        log_probs, values = out if entropy != "none" else (out, None)
    return whole(log_probs, batch, info), None if values is None else whole(values, batch, info)


def response_logits(model: Any, batch: MicroBatch, output: Tensor) -> Tensor:
    """Logits [r, V_local] of the response positions in the model's dtype, padding columns too: no prompt token and no
    padding reaches the head."""
    hidden = tensor_parallel.copy_to_tensor_model_parallel_region(response_hidden(model, batch, output))
    return torch.nn.functional.linear(hidden, output_weight(model))


def whole(per_token: Tensor, batch: MicroBatch, info: ParallelInfo) -> Tensor:
    """[r, ...] of each context-parallel rank -> [R, ...] of the micro-batch on all of them. Collective over them.

    Each rank must go on to compute the same loss from it: the backward hands every rank the gradient of its own rows.
    """
    if batch.mine is None:
        return per_token
    return _Whole.apply(per_token, batch.mine, len(batch.sample_of_row), info.cp_group)


class _Whole(torch.autograd.Function):
    """`zeros(R).index_copy(0, mine, x)`, summed over ranks; every row is one rank's, so that sums are exact."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mine: Tensor, rows: int, group: Any) -> Tensor:
        ctx.save_for_backward(mine)
        out = x.new_zeros(rows, *x.shape[1:]).index_copy_(0, mine, x)
        dist.all_reduce(out, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None, None, None]:
        (mine,) = ctx.saved_tensors
        return upstream.index_select(0, mine), None, None, None


@torch.no_grad()
def log_probs_of_data(
    model: Any,
    info: ParallelInfo,
    batches: Iterable[MicroBatch],
    count: int,
    response_lengths: list[int],
    head: Head,
    *,
    temperature: float,
    workspace_bytes: int,
) -> list[Tensor]:
    """Log-probs of every sample of a rank without gradient: one fp32 tensor [response length] per sample.

    `count` micro-batches hold all samples. Collective over tensor-, context- and pipeline-parallel ranks.
    """

    def parts(batch: MicroBatch, output: Tensor) -> list[tuple[int, Tensor]]:
        log_probs, _ = token_log_probs(
            model,
            info,
            batch,
            output,
            head,
            temperature=temperature,
            entropy="none",
            workspace_bytes=workspace_bytes,
        )
        return list(zip(batch.samples, batch.split(log_probs, response_lengths), strict=True))

    kept = run_forward(model, info, batches, count, parts)
    found = dict(pair for of_batch in kept for pair in of_batch)
    found = tensors_from_last_stage(info, found, dict(enumerate(response_lengths)))
    return [found[i] for i in range(len(response_lengths))]
