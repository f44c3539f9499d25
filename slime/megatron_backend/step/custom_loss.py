"""Functions that custom losses and advantage functions call: log-probs from their logits, and slime's advantages.

Shapes: r response tokens of this context-parallel rank in a micro-batch, r_i response tokens of this rank in sample i,
V_local vocabulary rows of this tensor-parallel rank.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator
from typing import Any

import torch
from megatron.core import parallel_state
from torch import Tensor

from slime.algo import ppo
from slime.algo.estimators import surrogate_for
from slime.algo.policy_loss import policy_loss
from slime.algo.selected_log_probs import (
    ContextParallelLayout,
    Pair,
    SelectedLogprobRequest,
    selected_log_probs,
)
from slime.algo.token_columns import TokenColumns
from slime.config.schema import Config, read_section
from slime.config.sections.kernels import KernelsConfig
from slime.data.columns import present
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


def policy_loss_function(
    args: Namespace, batch: TrainData, logits: Tensor, sum_of_sample_mean: Callable[[Tensor], Tensor]
) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns loss and metrics of the policy loss (--pg-loss-type, --use-kl-loss, --use-tis and others), for a custom
    loss that adds terms to it. The arguments are those of --custom-loss-function-path.

    Raises ValueError for a loss that reads whole sequences on context-parallel ranks, because a custom loss has only
    the tokens of its rank.
    """
    config = Config.from_args(args)
    off_policy, ratio = config.off_policy, surrogate_for(config.algorithm).ratio
    hooked = off_policy.custom_tis_function_path or config.algorithm.custom_pg_loss_reducer_function_path
    whole = off_policy.use_opsm or off_policy.use_rs or hooked or ratio != "token"
    if whole and parallel_state.get_context_parallel_world_size() > 1:
        raise ValueError(
            "policy_loss_function must have whole sequences for --use-opsm, --use-rs, ratios of sequences, "
            "--custom-tis-function-path and --custom-pg-loss-reducer-function-path, got context-parallel ranks; set "
            "--context-parallel-size 1 or --loss-type policy_loss"
        )
    _, out = get_log_probs_and_entropy(
        logits,
        args=args,
        unconcat_tokens=batch["unconcat_tokens"],
        total_lengths=batch["total_lengths"],
        response_lengths=batch["response_lengths"],
        with_entropy=True,
    )
    log_probs = torch.cat(out["log_probs"])
    columns = _token_columns(batch, log_probs, torch.cat(out["entropy"]), sum_of_sample_mean)
    loss, sums, _ = policy_loss(config, columns)
    return loss, {name: value.detach() for name, value in sums.items()}


def _token_columns(
    batch: TrainData, log_probs: Tensor, entropy: Tensor, sum_of_sample_mean: Callable[[Tensor], Tensor]
) -> TokenColumns:
    """Returns the columns of a custom loss, with the weights of `sum_of_sample_mean`, which is linear: its gradient."""
    with torch.enable_grad():
        ones = torch.ones_like(log_probs, requires_grad=True)
        (weights,) = torch.autograd.grad(sum_of_sample_mean(ones), ones)
    mask = (weights != 0).to(log_probs.dtype)
    columns = {
        column.name: torch.cat([torch.as_tensor(x, device=log_probs.device) for x in batch[column.name]])
        for column in present(batch, "response")
        if column.name != "loss_masks" and all(x is not None for x in batch[column.name])
    }
    columns |= {"loss_masks": mask, "loss_denominators": torch.where(mask != 0, 1 / weights, 1.0)}
    lengths = [len(x) for x in batch["advantages"]]
    sample_of_row = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    totals = list(batch["total_lengths"])
    return TokenColumns(
        log_probs, entropy, columns, sample_of_row.to(log_probs.device), totals, lengths, normaliser=1.0
    )


def compute_advantages_and_returns(args: Namespace, rollout_data: TrainData) -> None:
    """Sets `advantages`, `returns` and `kl` of `rollout_data` by --advantage-estimator, as without a hook."""
    group = parallel_state.get_data_parallel_group()
    ppo.compute_advantages_and_returns(Config.from_args(args), rollout_data, dp_group=group)
