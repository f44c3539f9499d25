"""Functions that custom losses and advantage functions call: log-probs from their logits, and slime's advantages.

Shapes: r response tokens of this context-parallel rank in a micro-batch, r_i response tokens of this rank in sample i,
V_local vocabulary rows of this tensor-parallel rank.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core import parallel_state
from torch import Tensor

from slime.algo import ppo
from slime.algo.selected_log_probs import (
    ContextParallelLayout,
    Pair,
    SelectedLogprobRequest,
    selected_log_probs,
)
from slime.config.schema import Config, read_section
from slime.config.sections.kernels import KernelsConfig
from slime.megatron_backend.step.context_parallel import response_bounds
from slime.types import TrainData


def get_responses(
    logits: Tensor,
    *,
    unconcat_tokens: list[Tensor],
    total_lengths: list[int],
    response_lengths: list[int],
    **_: Any,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields (logits [r_i, V_local], their tokens [r_i]) per sample. `logits` are the logits that a custom loss gets.

    The logits are already divided by the temperature. Further arguments, such as `args`, are not read.
    """
    bounds = [
        response_bounds(total, response)
        for total, response in zip(total_lengths, response_lengths, strict=True)
    ]
    rows = [sum(stop - start for start, stop in of_sample) for of_sample in bounds]
    if len(logits) != sum(rows):
        raise ValueError(
            f"logits must have one row per response token of this rank, got {len(logits)} for {sum(rows)}; pass the "
            "logits that --custom-loss-function-path gets"
        )
    parts = zip(logits.split(rows), bounds, unconcat_tokens, response_lengths, strict=True)
    for of_sample, (of_logits, runs, tokens, response) in enumerate(parts):
        answer = tokens[len(tokens) - response :]
        assert total_lengths[of_sample] == len(tokens), "tokens are those of the sample"
        yield of_logits, torch.cat([answer[start:stop] for start, stop in runs]).to(logits.device)


def get_log_probs_and_entropy(
    logits: Tensor,
    *,
    args: Namespace,
    unconcat_tokens: list[Tensor],
    total_lengths: list[int],
    response_lengths: list[int],
    with_entropy: bool = False,
    **_: Any,
) -> tuple[Tensor, dict[str, list[Tensor]]]:
    """Returns (an empty tensor, {"log_probs": [r_i] per sample, "entropy": the same if requested}), fp32 nats.

    The first value is slime's slot for a loss. The arguments are those of `get_responses`, but `args` is read: it may
    name a --selected-logprob-provider.
    """
    chunks = list(
        get_responses(
            logits,
            unconcat_tokens=unconcat_tokens,
            total_lengths=total_lengths,
            response_lengths=response_lengths,
        )
    )
    tokens = torch.cat([of_sample for _, of_sample in chunks])
    ranks, rank = parallel_state.get_context_parallel_world_size(), parallel_state.get_context_parallel_rank()
    request = SelectedLogprobRequest(
        logits=logits,
        target_ids=tokens,
        tensor_parallel_group=parallel_state.get_tensor_model_parallel_group(),
        context_parallel=ContextParallelLayout(ranks, rank, "zigzag" if ranks > 1 else "single"),
        with_entropy=with_entropy,
        with_entropy_grad=with_entropy,
        chunk_size=-1,
    )
    log_probs, entropy = selected_log_probs(read_section(KernelsConfig, args), request, _by_logp)
    rows = [len(of_sample) for _, of_sample in chunks]
    out = {"log_probs": list(log_probs[:, 0].split(rows))}
    if entropy is not None:
        out["entropy"] = list(entropy.split(rows))
    return logits.new_empty(0), out


def _by_logp(logits: Tensor, tokens: Tensor, group: object, *, with_entropy: bool, **_: object) -> Pair:
    log_probs, entropy = ppo.calculate_log_probs_and_entropy(logits, tokens, group, with_entropy=with_entropy)
    return log_probs[:, None], entropy


def compute_advantages_and_returns(args: Namespace, rollout_data: TrainData) -> None:
    """Sets `advantages`, `returns` and `kl` of `rollout_data` by --advantage-estimator, as without a hook."""
    group = parallel_state.get_data_parallel_group()
    ppo.compute_advantages_and_returns(Config.from_args(args), rollout_data, dp_group=group)
