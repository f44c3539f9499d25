"""The loss of held-out samples: the objective of training over passes without gradient.

    samples -> scorers (reference log-probs) -> forward pass per micro-batch -> objective -> mean over the set

The module changes no weight, no optimizer and no random state: the passes run in evaluation mode, which draws no
dropout.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from slime import operators
from slime.algo.losses import loss_for
from slime.config import Config
from slime.config.hook_calls import Hooks
from slime.data.packing import MicroBatch
from slime.data.rank_data import RankData
from slime.megatron_backend.step.batches import Batches
from slime.megatron_backend.step.heads import build_head
from slime.megatron_backend.step.heads.head import MicroBatchLoss
from slime.megatron_backend.step.learner import Learner
from slime.megatron_backend.step.loss import LossSetup, objective_loss, reduce_metrics
from slime.megatron_backend.step.pipeline import from_last_stage, run_forward
from slime.megatron_backend.step.scorers import build_scorers
from slime.tracking.timers import Timers


class HeldOut:
    """Computes held-out losses on a trainer rank that has the policy. Its times are separate from the training times,
    which the next step reports."""

    def __init__(
        self,
        config: Config,
        hooks: Hooks,
        learner: Learner,
        models: Mapping[str, nn.Module],
        batches: Batches,
    ) -> None:
        self.config, self.learner, self.batches = config, learner, batches
        self.timers = Timers()
        self.scorers = build_scorers(config, hooks, models, learner.info, batches, self.timers)
        # The one-pass head of training computes gradients in its forward, so a head for passes is used.
        value = loss_for(config.algorithm).head == "value"
        kind = operators.VALUES if value else operators.pass_head(config)
        self.head = build_head(config, kind, learner.model, learner.info)
        self.setup = LossSetup(config, hooks, self.head, self.timers)

    @torch.no_grad()
    def means(self, data: RankData) -> dict[str, float]:
        """Returns loss and metrics of a set under their names in training, as means over the whole set. Collective over
        all ranks. The columns stay on the host, and each micro-batch moves its own columns, so that a large set
        fits."""
        flags = self.config.algorithm
        length = flags.dr_grpo_length if flags.use_dr_grpo else None
        data.to_device(torch.device("cpu"), per_token=flags.calculate_per_token_loss, length=length)
        for scorer in self.scorers:
            scorer.fill(data)
        (normaliser,) = data.normalisers

        def loss(batch: MicroBatch, output: Tensor) -> MicroBatchLoss:
            return objective_loss(self.setup, data, batch, output, normaliser)

        info, micro_batches = self.learner.info, data.micro_batches
        batches = self.batches.pack_evaluation(data)
        losses = run_forward(self.learner.model, info, batches, len(micro_batches), loss)
        self.timers.flush()
        counts = [float(index < data.counted_micro_batches) for index in range(len(losses))]
        weighted = [
            replace(one, sums=_times(one.sums, count)) for one, count in zip(losses, counts, strict=True)
        ]
        return from_last_stage(info, reduce_metrics(weighted, self.head.loss_group) if weighted else {})


def _times(sums: dict[str, Tensor], count: float) -> dict[str, Tensor]:
    """Returns `sums` times `count` in float64, so that the sum depends little on the order of micro-batches and
    ranks."""
    return {name: value.double() * count for name, value in sums.items()}
