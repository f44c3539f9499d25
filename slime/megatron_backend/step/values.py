"""The critic on one rank: its values per token, and its training on the returns."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from slime.algo.value_loss import error_sums, explained_variance, value_loss
from slime.config import Config
from slime.data.packing import MicroBatch
from slime.data.rank_data import RankData
from slime.megatron_backend.model.gpt import compute_values, gather_hidden
from slime.megatron_backend.model.rows import GatheredRows, take
from slime.megatron_backend.parallel import ParallelInfo
from slime.megatron_backend.step.batches import Batches
from slime.megatron_backend.step.heads.head import MicroBatchLoss, whole
from slime.megatron_backend.step.learner import Learner

READS = ("loss_masks", "loss_denominators", "values", "returns")
"""The columns of a critic's training micro-batch."""


def local_values(model: nn.Module, batch: MicroBatch, output: Tensor) -> Tensor:
    """Returns values [r] fp32 of this context-parallel rank's response tokens, from the last stage's output.

    The value of a token is the value of the state before it, from the same row as its log-prob.
    """
    hidden = gather_hidden(model, output)
    return compute_values(model, take(hidden, GatheredRows.of(batch.rows, len(hidden))))


def values_per_token(model: nn.Module, info: ParallelInfo, batch: MicroBatch, output: Tensor) -> Tensor:
    """Returns values [R] on every context-parallel rank."""
    return whole(local_values(model, batch, output), batch, info)


class CriticTraining:
    """Training of the critic on a trainer rank."""

    first_rollout: float = 0

    def __init__(self, config: Config, learner: Learner, batches: Batches) -> None:
        self.config, self.learner, self.batches = config, learner, batches

    def train(self, rollout_id: int, data: RankData) -> tuple[list[dict[str, float]], dict[str, float]]:
        """Runs all optimizer steps of a rollout and returns their metrics. Collective over all ranks."""
        with self.learner.timers.measure("critic_train"):
            steps = [
                self._step(rollout_id, data, micro_batches, step_id)
                for step_id, micro_batches in enumerate(data.steps)
            ]
            self.learner.require_finite(rollout_id)
        return steps, {}

    def _step(
        self, rollout_id: int, data: RankData, micro_batches: list[list[int]], step_id: int
    ) -> dict[str, float]:
        learner = self.learner
        metrics = learner.step(
            rollout_id,
            step_id,
            self.batches.pack_training(data, micro_batches, READS),
            len(micro_batches),
            self._losses,
            samples=data.global_batch_sizes[step_id],
            loss_group=learner.info.dp_cp_group,  # each context-parallel rank has the loss of its own tokens
        )
        self.batches.finish(len(micro_batches))
        with learner.timers.measure("step_metrics"):
            explained = self._explained_variance(data, micro_batches)
        return metrics | {f"train/{learner.role.metrics}explained_variance": explained}

    def _losses(self, batch: MicroBatch, output: Tensor) -> MicroBatchLoss:
        timers = self.learner.timers
        with timers.measure("forward"):
            values = local_values(self.learner.model, batch, output)
        with timers.measure("policy_loss"):
            mask, denominators, old, returns = (batch.local(batch.columns[name]) for name in READS)
            clip = self.config.critic.value_clip
            loss, sums, maxima = value_loss(values, old, returns, mask / denominators, value_clip=clip)
        return MicroBatchLoss(loss, sums, maxima)

    def _explained_variance(self, data: RankData, micro_batches: list[list[int]]) -> float:
        """Returns the explained variance of the values before the rollout's first step, over the step's trained tokens
        on all ranks."""
        samples = [i for of_batch in micro_batches for i in of_batch]
        columns = (
            torch.cat([data.tensors(name)[i] for i in samples])
            for name in ("values", "returns", "loss_masks")
        )
        sums = error_sums(*columns)
        dist.all_reduce(sums, group=self.learner.info.dp_group)
        return explained_variance(sums)
