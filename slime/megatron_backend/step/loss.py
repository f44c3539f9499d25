"""The loss of a micro-batch: the LM head computes log-probs, slime.algo the objective. This module holds no formula."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor

from slime.algo.importance import weighted
from slime.algo.losses import loss_for
from slime.algo.needs import ids_read
from slime.algo.token_columns import HookView, Losses, TokenColumns
from slime.config import Config
from slime.config.hook_calls import Hooks
from slime.data.columns import present
from slime.data.packing import MicroBatch
from slime.megatron_backend.step.context_parallel import hook_view
from slime.megatron_backend.step.heads.head import LmHead, MicroBatchLoss
from slime.megatron_backend.step.native import EntropyUse
from slime.megatron_backend.step.prediction import Predictions
from slime.tracking.timers import Timers
from slime.types import TrainData


@dataclass(frozen=True)
class LossSetup:
    """The objects that all micro-batch losses share. `hooks.config` has the flags that objectives read.
    `predictions`: multi-token prediction, None if the run does not train it."""

    config: Config
    hooks: Hooks
    head: LmHead
    timers: Timers
    predictions: Predictions | None = None


def micro_batch_loss(
    setup: LossSetup, data: TrainData, batch: MicroBatch, output: Tensor, normaliser: float
) -> MicroBatchLoss:
    """Returns loss and metrics by --loss-type from the last stage's `output`, plus the loss and metric of multi-token
    prediction. The denominators of the tokens turn sums into means."""
    loss = objective_loss(setup, data, batch, output, normaliser)
    if setup.predictions is None:
        return loss
    with setup.timers.measure("mtp"):
        predicted, metric = setup.predictions.loss(batch, output)
    return replace(loss, loss=loss.loss + predicted, sums=loss.sums | {"mtp_loss": metric})


def objective_loss(
    setup: LossSetup, data: TrainData, batch: MicroBatch, output: Tensor, normaliser: float
) -> MicroBatchLoss:
    """Returns loss and metrics by --loss-type."""
    config, head = setup.config, setup.head
    kind = loss_for(config.algorithm)
    objective = kind.objective
    if objective is None:
        return custom_loss(setup, data, batch, output, normaliser)
    total_lengths = [data["total_lengths"][i] for i in batch.samples]
    response_lengths = [data["response_lengths"][i] for i in batch.samples]
    view, flags = hook_view(batch, total_lengths, response_lengths, head.ranks), setup.hooks.config
    if flags.off_policy.custom_tis_function_path:
        view = replace(view, args=setup.hooks.args)
    per_token = {"sample_of_row": batch.sample_of_row, **batch.columns}
    per_token = {name: head.loss_rows(batch, x) for name, x in per_token.items()}

    def losses(
        log_probs: Tensor, entropy: Tensor | None, rows: slice, of_ids: Tensor | None = None
    ) -> Losses:
        of_rows = {name: x[rows] for name, x in per_token.items()}
        sample_of_row = of_rows.pop("sample_of_row")
        lengths = total_lengths, response_lengths
        columns = TokenColumns(log_probs, entropy, of_rows, sample_of_row, *lengths, normaliser, view, of_ids)
        return objective(flags, columns)

    use: EntropyUse = "loss" if config.algorithm.entropy_coef != 0 else "metric"
    ids = None if (column := ids_read(config)) is None else batch.columns[column]
    return head.loss(batch, output, losses, use if kind.entropy else "none", setup.timers, ids)


def custom_loss(
    setup: LossSetup, data: TrainData, batch: MicroBatch, output: Tensor, normaliser: float
) -> MicroBatchLoss:
    """Runs `--custom-loss-function-path`: fn(args, batch, logits, sum_of_sample_mean) -> (loss, metrics).

    `logits` come from `LmHead.logits`, [r, V_local]. `batch` has the columns of the micro-batch's samples, and the
    tokens also as `unconcat_tokens`. Under context parallelism logits and columns cover this rank's response tokens
    (`context_parallel.py`); loss masks and tokens are whole. `sum_of_sample_mean(x)`, x [r], is this rank's part of the
    sum of the samples' means (or over all tokens with --calculate-per-token-loss). This function adds the parts of the
    loss, and of metrics that are tensors, over ranks and divides them by the step's `normaliser`.
    """
    view, columns = _hook_columns(setup, data, batch)
    weights = view.local(batch.columns["loss_masks"] / batch.columns["loss_denominators"] * normaliser)

    def sum_of_sample_mean(per_token: Tensor) -> Tensor:
        return weighted(per_token, weights).sum()

    with setup.timers.measure("forward"):
        logits = setup.head.logits(batch, output)
    with setup.timers.measure("policy_loss"):
        loss, metrics = setup.hooks.call("custom_loss_function_path", columns, logits, sum_of_sample_mean)
    loss = view.total(loss)
    parts = {name: view.total(x.detach()) for name, x in metrics.items() if isinstance(x, Tensor)}
    sums = {
        name: torch.as_tensor(value).detach() / normaliser for name, value in {**metrics, **parts}.items()
    }
    return MicroBatchLoss(loss / normaliser, {"loss": loss.detach() / normaliser, **sums}, {})


def _hook_columns(setup: LossSetup, data: TrainData, batch: MicroBatch) -> tuple[HookView, TrainData]:
    """Returns the view of a custom loss, and the columns of the micro-batch's samples in that view."""
    out: TrainData = {
        name: [values[i] for i in batch.samples]
        for name, values in data.items()
        if isinstance(values, list) and len(values) == len(data["tokens"])
    }
    out["unconcat_tokens"] = out["tokens"]
    view = hook_view(batch, out["total_lengths"], out["response_lengths"], setup.head.ranks)
    for column in present(data, "response"):
        if column.name != "loss_masks" and all(x is not None for x in out[column.name]):
            out[column.name] = view.split(torch.cat(out[column.name]).to(batch.tokens.device))
    return view, out


def reduce_metrics(losses: list[MicroBatchLoss], group: dist.ProcessGroup) -> dict[str, float]:
    """Returns the sums of `sums` over micro-batches and the ranks of `group`, and the largest values of `maxima`. The
    denominators of the tokens turn the sums into means."""
    sums = {name: cast(Tensor, sum(loss.sums[name] for loss in losses)) for name in losses[0].sums}
    maxima = {name: torch.stack([loss.maxima[name] for loss in losses]).amax() for name in losses[0].maxima}
    out: dict[str, float] = {}
    for values, op in ((sums, dist.ReduceOp.SUM), (maxima, dist.ReduceOp.MAX)):
        if values:
            packed = torch.stack([value.detach().double() for value in values.values()])
            dist.all_reduce(packed, op=op, group=group)
            out.update(zip(values, packed.tolist(), strict=True))
    return out
