"""The loss of one micro-batch: forward to log-probs, then the objective of slime.algo. Holds no formula."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from slime.algo.policy_loss import TokenColumns, policy_loss, sft_loss
from slime.data.packing import MicroBatch
from slime.hooks import load_function
from slime.megatron_backend.forward import response_logits, token_log_probs
from slime.types import TrainData

if TYPE_CHECKING:
    from slime.megatron_backend.trainer import MegatronTrainer


@dataclass
class MicroBatchLoss:
    """Over micro-batches and data-parallel ranks `loss` and `sums` are added up, of `maxima` the largest is kept."""

    loss: Tensor
    sums: dict[str, Tensor]
    maxima: dict[str, Tensor]


def micro_batch_loss(
    trainer: MegatronTrainer, data: TrainData, batch: MicroBatch, normaliser: float
) -> MicroBatchLoss:
    """Loss and metrics by --loss-type. Sums are already means: the denominators of the tokens see to it."""
    if trainer.config.loss_type == "custom_loss":
        return custom_loss(trainer, data, batch, normaliser)
    log_probs, entropy = token_log_probs(trainer.model, trainer.info, batch, temperature=trainer.temperature)
    columns = TokenColumns(
        log_probs=log_probs,
        entropy=entropy,
        normaliser=normaliser,
        sample_of_row=batch.sample_of_row,
        total_lengths=[data["total_lengths"][i] for i in batch.samples],
        response_lengths=[data["response_lengths"][i] for i in batch.samples],
        **{name: batch.columns.get(column) for name, column in _COLUMN_OF.items()},
    )
    objective = sft_loss if trainer.config.loss_type == "sft_loss" else policy_loss
    return MicroBatchLoss(*objective(trainer.args, columns))


_COLUMN_OF = {
    "mask": "loss_masks",
    "denominators": "loss_denominators",
    "advantages": "advantages",
    "old_log_probs": "old_log_probs",
    "ref_log_probs": "ref_log_probs",
    "rollout_log_probs": "rollout_log_probs",
}


def custom_loss(
    trainer: MegatronTrainer, data: TrainData, batch: MicroBatch, normaliser: float
) -> MicroBatchLoss:
    """`--custom-loss-function-path`: fn(args, batch, logits, sum_of_sample_mean) -> (loss, metrics).

    `logits` [R, V_local] fp32 of the response positions, divided by the temperature; `batch` has the rank's columns
    for the samples of the micro-batch. `sum_of_sample_mean(x)` adds up the means of the samples (or all tokens with
    --calculate-per-token-loss); the loss it returns is divided by the step's `normaliser` here.
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
    logits = response_logits(trainer.model, batch) / trainer.temperature
    loss, metrics = hook(trainer.args, columns, logits, sum_of_sample_mean)
    sums = {name: torch.as_tensor(value).detach() / normaliser for name, value in metrics.items()}
    return MicroBatchLoss(loss / normaliser, {"loss": loss.detach() / normaliser, **sums}, {})
