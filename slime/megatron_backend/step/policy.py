"""Trains the policy: the losses of its micro-batches, and the objects that read their log-probs during training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from slime import operators
from slime.checkpoints.divergence import DivergedError
from slime.config import Config
from slime.config.hook_calls import Hooks
from slime.data.packing import MicroBatch
from slime.data.rank_data import RankData
from slime.megatron_backend.kept_samples import SampleRecorder
from slime.megatron_backend.model.gpt import get_parts
from slime.megatron_backend.step.audit import Audit
from slime.megatron_backend.step.batches import Batches
from slime.megatron_backend.step.heads import build_head
from slime.megatron_backend.step.heads.head import MicroBatchLoss
from slime.megatron_backend.step.learner import Learner
from slime.megatron_backend.step.loss import LossSetup, micro_batch_loss
from slime.megatron_backend.step.prediction import Predictions
from slime.megatron_backend.step.routing_replay import Replay
from slime.megatron_backend.step.scorers import OldLogProbs
from slime.types import TrainData


class LogProbReader(Protocol):
    """Reads the log-probs of training passes."""

    def wants(self, data: TrainData, step_id: int) -> bool: ...

    def add(self, data: TrainData, batch: MicroBatch, log_probs: Tensor) -> None: ...


class PolicyTraining:
    """Training of the policy on a trainer rank. `old`: the scorer that may take its log-probs from the first step, or
    None. `receipt`: the reader of --receipt."""

    def __init__(
        self,
        config: Config,
        hooks: Hooks,
        learner: Learner,
        batches: Batches,
        replay: Replay,
        audit: Audit,
        old: OldLogProbs | None,
        receipt: LogProbReader | None = None,
    ) -> None:
        self.config, self.hooks, self.learner, self.batches = config, hooks, learner, batches
        self.replay, self.audit, self.old = replay, audit, old
        self.kept, self.receipt = SampleRecorder(config, learner.info), receipt
        self.first_rollout = config.critic.first_of_policy
        self.head = build_head(config, operators.loss_head(config)[0], learner.model, learner.info)
        ahead = None
        if config.algorithm.enable_mtp_training:
            ahead = Predictions(self.head, config.algorithm.mtp_loss_scaling_factor)
        self.setup = LossSetup(config, hooks, self.head, learner.timers, ahead)

    def train(self, rollout_id: int, data: RankData) -> tuple[list[dict[str, float]], dict[str, float]]:
        """Runs all optimizer steps of a rollout. Returns the metrics per step, and the metrics of the audit. Collective
        over all ranks."""
        timers, audited = self.learner.timers, dict[str, float]()
        with self.audit.watch(rollout_id, data, audited), timers.measure("actor_train"):
            with timers.measure("step_metrics"):
                require_finite_log_probs(rollout_id, data, {} if self.old is None else self.old.known)
            steps = self.optimizer_steps(rollout_id, data)
        with timers.measure("rollout_metrics"):
            self.kept.write(rollout_id, data)
        return steps, audited

    def optimizer_steps(self, rollout_id: int, data: RankData) -> list[dict[str, float]]:
        learner, steps = self.learner, []
        for step_id, micro_batches in enumerate(data.steps):
            inputs = get_parts(learner.model), learner.optimizer, learner.scheduler
            self.hooks.call("custom_megatron_before_train_step_hook_path", rollout_id, step_id, *inputs)
            steps.append(self._step(rollout_id, data, micro_batches, step_id))
        learner.require_finite(rollout_id)
        return steps

    def _step(
        self, rollout_id: int, data: RankData, micro_batches: list[list[int]], step_id: int
    ) -> dict[str, float]:
        def losses(batch: MicroBatch, output: Tensor) -> MicroBatchLoss:
            return self._losses(data, batch, output, step_id)

        metrics = self.learner.step(
            rollout_id,
            step_id,
            self.batches.pack_training(data, micro_batches),
            len(micro_batches),
            losses,
            samples=data.global_batch_sizes[step_id],
            loss_group=self.head.loss_group,
        )
        self.batches.finish(len(micro_batches))
        if self.old is not None and self.old.wants(step_id):
            self.old.complete(data)
        with self.learner.timers.measure("step_metrics"):
            replayed = self.replay.metrics()
        return metrics | replayed

    def _losses(self, data: RankData, batch: MicroBatch, output: Tensor, step_id: int) -> MicroBatchLoss:
        loss = micro_batch_loss(self.setup, data, batch, output, data.normalisers[step_id])
        readers: list[LogProbReader | OldLogProbs]
        readers = [
            reader
            for reader in (self.audit, self.kept, self.receipt)
            if reader is not None and reader.wants(data, step_id)
        ]
        if self.old is not None and self.old.wants(step_id):
            readers.append(self.old)
        if loss.log_probs is not None and readers:
            with self.learner.timers.measure("policy_loss"):
                log_probs = self.head.all_rows(batch, loss.log_probs)
                for reader in readers:
                    reader.add(data, batch, log_probs)
        return loss


def require_finite_log_probs(rollout_id: int, data: TrainData, later: Mapping[int, Tensor]) -> None:
    """Raises DivergedError if the log-prob of a trained token is not finite. `later` has old log-probs by sample, for
    samples of later steps. The previous rollout produced the policy's weights."""
    found = {name: dict(enumerate(data[name])) for name in ("ref_log_probs", "old_log_probs") if name in data}
    for name, of_sample in ({"old_log_probs": later} | found).items():
        if not of_sample:
            continue
        mask = torch.cat([data["loss_masks"][i] for i in of_sample]) != 0
        values = torch.cat(list(of_sample.values()))[mask]
        if not values.isfinite().all():
            bad = values[~values.isfinite()][0].item()
            raise DivergedError(f"{name} must be finite, got {bad} in rollout {rollout_id}", rollout_id - 1)
