"""The loss of one micro-batch: forward to log-probs, then the objective of slime.algo. Holds no formula."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

import rl_kernel
from slime.algo.policy_loss import Losses, TokenColumns, policy_loss, sft_loss
from slime.data.packing import MicroBatch
from slime.hooks import load_function
from slime.megatron_backend.forward import (
    head_arguments,
    response_hidden,
    response_logits,
    token_log_probs,
    whole,
)
from slime.megatron_backend.model import head_main_grad, output_weight, vocab_range
from slime.megatron_backend.native import EntropyUse, mask_padding
from slime.types import TrainData

if TYPE_CHECKING:
    from slime.megatron_backend.trainer import MegatronTrainer


@dataclass
class MicroBatchLoss:
    """Over micro-batches and data-parallel ranks `loss` and `sums` are added up, of `maxima` the largest is kept.

    Context-parallel ranks have the terms of their own tokens each when the loss is computed in one pass, and are added
    up too; otherwise all of them compute the whole loss. `log_probs` are the trainer's, detached: [r] in one pass, else
    [R]; None where a hook computed the loss.
    """

    loss: Tensor
    sums: dict[str, Tensor]
    maxima: dict[str, Tensor]
    log_probs: Tensor | None = None


Columns = Callable[[Tensor, Tensor | None, slice], TokenColumns]


def micro_batch_loss(
    trainer: MegatronTrainer, data: TrainData, batch: MicroBatch, output: Tensor, normaliser: float
) -> MicroBatchLoss:
    """Loss and metrics by --loss-type from the last stage's `output`. Sums are already means: the denominators of the
    tokens see to it."""
    if trainer.config.loss_type == "custom_loss":
        return custom_loss(trainer, data, batch, output, normaliser)
    objective = sft_loss if trainer.config.loss_type == "sft_loss" else policy_loss
    shared = {
        "normaliser": normaliser,
        "total_lengths": [data["total_lengths"][i] for i in batch.samples],
        "response_lengths": [data["response_lengths"][i] for i in batch.samples],
    }
    per_token = {name: batch.columns.get(column) for name, column in _COLUMN_OF.items()}
    per_token["sample_of_row"] = batch.sample_of_row
    in_one_pass = trainer.head == "linear_token_loss"
    if in_one_pass:
        per_token = {name: None if x is None else batch.local(x) for name, x in per_token.items()}

    def columns(log_probs: Tensor, entropy: Tensor | None, rows: slice) -> TokenColumns:
        of_rows = {name: None if x is None else x[rows] for name, x in per_token.items()}
        return TokenColumns(log_probs=log_probs, entropy=entropy, **shared, **of_rows)

    if in_one_pass:
        return one_pass(trainer, batch, output, objective, columns)
    config = trainer.config
    use: EntropyUse = "loss" if config.entropy_coef != 0 else "metric"
    with trainer.timers.measure("forward"):
        log_probs, entropy = token_log_probs(
            trainer.model,
            trainer.info,
            batch,
            output,
            trainer.head,
            temperature=trainer.temperature,
            entropy="none" if config.loss_type == "sft_loss" else use,
            workspace_bytes=trainer.workspace_bytes,
        )
    with trainer.timers.measure("policy_loss"):
        loss, sums, maxima = objective(trainer.args, columns(log_probs, entropy, slice(None)))
    # Detached: a metric that carries a graph would keep the logits of its micro-batch until the step has ended.
    sums = {name: value.detach() for name, value in sums.items()}
    return MicroBatchLoss(loss, sums, maxima, log_probs.detach())


_COLUMN_OF = {
    "mask": "loss_masks",
    "denominators": "loss_denominators",
    "advantages": "advantages",
    "old_log_probs": "old_log_probs",
    "ref_log_probs": "ref_log_probs",
    "rollout_log_probs": "rollout_log_probs",
}


def one_pass(
    trainer: MegatronTrainer,
    batch: MicroBatch,
    output: Tensor,
    objective: Callable[..., Losses],
    columns: Columns,
) -> MicroBatchLoss:
    """The objective inside rl_kernel.linear_token_loss, block by block of tokens: its logits become their gradient at
    once, and the head's weight gradient goes straight into Megatron's fp32 `main_grad`."""
    sums: dict[str, Tensor] = {}
    maxima: dict[str, Tensor] = {}

    def token_loss(
        log_probs: Tensor, entropy: Tensor | None, rows: slice
    ) -> tuple[Tensor, dict[str, Tensor]]:
        loss, added, largest = objective(trainer.args, columns(log_probs, entropy, rows))
        for name, value in added.items():
            sums[name] = sums[name] + value.detach() if name in sums else value.detach()
        for name, value in largest.items():
            maxima[name] = torch.maximum(maxima[name], value) if name in maxima else value
        return loss, {}

    with trainer.timers.measure("forward"):
        hidden = response_hidden(trainer.model, batch, output)
    with trainer.timers.measure("policy_loss"):
        result = rl_kernel.linear_token_loss(
            hidden,
            output_weight(trainer.model),
            batch.targets,
            token_loss,
            temperature=trainer.temperature,
            return_entropy=trainer.config.loss_type != "sft_loss",
            workspace_bytes=trainer.workspace_bytes,
            weight_grad=head_main_grad(trainer.model),
            **head_arguments(trainer.model, trainer.info),
        )
    return MicroBatchLoss(result.loss, sums, maxima, result.log_probs)


def custom_loss(
    trainer: MegatronTrainer, data: TrainData, batch: MicroBatch, output: Tensor, normaliser: float
) -> MicroBatchLoss:
    """`--custom-loss-function-path`: fn(args, batch, logits, sum_of_sample_mean) -> (loss, metrics).

    `logits` [R, V_local] fp32 of the response positions, divided by the temperature, padding columns at -1e30 and less:
    no part of a softmax over the row. All rows on every context-parallel rank, which saves no memory here. `batch` has
    the rank's columns for the samples of the micro-batch. `sum_of_sample_mean(x)` adds up the means of the samples (or
    all tokens with --calculate-per-token-loss); the loss it returns is divided by the step's `normaliser` here.
    """
    columns = {
        name: [values[i] for i in batch.samples]
        for name, values in data.items()
        if isinstance(values, list) and len(values) == len(data["tokens"])
    }
    weights = batch.columns["loss_masks"] / batch.columns["loss_denominators"] * normaliser

    def sum_of_sample_mean(per_token: Tensor) -> Tensor:
        return (per_token * weights).sum()

    hook = load_function(trainer.config.custom_loss_function_path, flag="--custom-loss-function-path")
    with trainer.timers.measure("forward"):
        logits = whole(response_logits(trainer.model, batch, output).float(), batch, trainer.info)
        logits = mask_padding(logits, *vocab_range(trainer.model)) / trainer.temperature
    with trainer.timers.measure("policy_loss"):
        loss, metrics = hook(trainer.args, columns, logits, sum_of_sample_mean)
    sums = {name: torch.as_tensor(value).detach() / normaliser for name, value in metrics.items()}
    return MicroBatchLoss(loss / normaliser, {"loss": loss.detach() / normaliser, **sums}, {})
