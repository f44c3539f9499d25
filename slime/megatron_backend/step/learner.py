"""A trained role on one rank: its model, optimizer and schedule, its checkpoint, and the steps that train it."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from slime.checkpoints.divergence import DivergedError
from slime.checkpoints.retention import after_save
from slime.config import Config
from slime.config.problems import require_value
from slime.config.sections.cluster import PARTS
from slime.data.packing import MicroBatch
from slime.data.rank_data import RankData
from slime.megatron_backend.bitwise.install import adaptation
from slime.megatron_backend.checkpoint import distributed as checkpoint
from slime.megatron_backend.checkpoint.background import BackgroundSaves
from slime.megatron_backend.checkpoint.memory_store import (
    MemoryStore,
    State,
    collect_state,
    make_record,
    restore_record,
)
from slime.megatron_backend.checkpoint.peft import FOLDER, load_peft, save_peft
from slime.megatron_backend.checkpoint.weights import load_weights
from slime.megatron_backend.host_memory import host_threads
from slime.megatron_backend.lora.base import note_base
from slime.megatron_backend.lora.install import add_adapters
from slime.megatron_backend.model.gpt import build_model, get_parts, unwrapped
from slime.megatron_backend.model.optimizer import build_optimizer, close_optimizer, finish_grads
from slime.megatron_backend.parallel import ParallelInfo
from slime.megatron_backend.step.heads.head import MicroBatchLoss
from slime.megatron_backend.step.loss import reduce_metrics
from slime.megatron_backend.step.pipeline import from_last_stage, run_stages
from slime.megatron_backend.step.residence import Residence
from slime.models.lora import Lora
from slime.roles import POLICY, Role
from slime.tracking.timers import Timers


class Training(Protocol):
    """The interface of an object that trains a learner on a rollout."""

    learner: Learner
    first_rollout: float
    """The first rollout that trains the learner."""

    def train(self, rollout_id: int, data: RankData) -> tuple[list[dict[str, float]], dict[str, float]]:
        """Runs all optimizer steps of a rollout. Returns the metrics per step, and metrics of the rollout. Collective
        over all ranks."""
        ...


MicroBatchLosses = Callable[[MicroBatch, Tensor], MicroBatchLoss]
"""Maps (micro-batch, the last stage's output) to the micro-batch's loss and metrics."""


class Learner:
    """A trained role. The constructor builds the model with the weights that the run starts with or resumes from.

    `resumed` is the record of the checkpoint from which the role resumed, None if it started from `role.source`.
    """

    def __init__(
        self, role: Role, config: Config, hf_config: dict[str, Any], info: ParallelInfo, timers: Timers
    ) -> None:
        self.role, self.config, self.info, self.timers = role, config, info, timers
        # Megatron's wrapper has no types.
        predicts = role is POLICY and config.algorithm.enable_mtp_training
        restart = role.restarts(config)
        lora, resume = Lora.of(config), restart or role.resumes(config)
        adapt = None if role.has_values(config) else adaptation(config)
        if lora is not None:
            adapt = partial(add_adapters, lora=lora, seed=config.train.seed)
        self.model: Any = build_model(
            hf_config, config, predicts=predicts, value=role.has_values(config), adapt=adapt
        )
        self.base = role.source(config)
        if resume is None or lora is not None:
            load_weights(
                self.model, self.base.directory, self.base.iteration, dithers=config.train.dither_weights
            )
        if lora is not None:
            note_base(unwrapped(self.model))
        if resume is None and config.lora.lora_load is not None and role is POLICY:
            load_peft(self.model, config.lora.lora_load)
        self.optimizer, self.scheduler = build_optimizer(
            self.model, config, total_steps=config.total_steps, role=role
        )
        self.resumed: dict[str, Any] | None = None
        if config.checkpoint.restart_dir is not None:
            self._load_from_memory()
        elif resume is not None:
            self.resumed = checkpoint.load_checkpoint(
                *(resume.directory, self.model, self.optimizer, self.scheduler),
                iteration=resume.iteration,
                optim=restart is not None or not config.checkpoint.no_load_optim,
                rng=role is POLICY and (restart is not None or not config.checkpoint.no_load_rng),
                adapters=lora is not None,
            )

    def step(
        self,
        rollout_id: int,
        step_id: int,
        batches: Iterator[MicroBatch],
        count: int,
        losses_of: MicroBatchLosses,
        *,
        samples: int,
        loss_group: dist.ProcessGroup,
    ) -> dict[str, float]:
        """Runs an optimizer step over `count` micro-batches and returns its metrics. `samples` is the number of
        rollouts by which the schedule advances. `loss_group` has the ranks whose losses add up. Collective over all
        ranks.

        Raises DivergedError if the gradients are not finite.
        """
        with self.timers.measure("optimizer"):
            self.model.zero_grad_buffer()
            self.optimizer.zero_grad()

        def on_output(batch: MicroBatch, output: Tensor) -> tuple[Tensor, MicroBatchLoss]:
            loss = losses_of(batch, output)
            return loss.loss, replace(loss, loss=loss.loss.detach())  # the backward ends the use of the graph

        losses = run_stages(self.model, self.info, batches, count, on_output, self.timers)
        with self.timers.measure("reduce_grads"):
            finish_grads(self.model)
        with self.timers.measure("optimizer"):
            updated, grad_norm, _ = self.optimizer.step()
        if not (updated and math.isfinite(grad_norm)):
            whose = "" if self.role is POLICY else f" ({self.role.name})"
            raise DivergedError(
                f"gradients must be finite, got norm {grad_norm} in step {step_id} of rollout {rollout_id}{whose}",
                rollout_id,
            )
        # before `scheduler.step`: the rate that this step used
        rates = {f"lr-pg_{i}": group["lr"] for i, group in enumerate(self.optimizer.param_groups)}
        self.scheduler.step(increment=samples)
        with self.timers.measure("step_metrics"):
            reduced = reduce_metrics(losses, loss_group) if losses else {}
            metrics = from_last_stage(self.info, reduced)
        metrics |= {"grad_norm": float(grad_norm), **rates}
        return {f"train/{self.role.metrics}{name}": value for name, value in metrics.items()}

    def require_finite(self, rollout_id: int) -> None:
        """Raises DivergedError if a weight of this rank is not finite after training the rollout. Reads each weight
        once."""
        with self.timers.measure("optimizer"):
            largest = torch.stack(torch._foreach_norm(list(self.model.parameters()), ord=math.inf)).max()
            if not largest.isfinite():
                raise DivergedError(
                    f"weights must be finite, got {largest.item()} after training rollout {rollout_id}",
                    rollout_id,
                )

    def reside(self, leaving: Collection[str], others: Iterable[nn.Module] = ()) -> Residence:
        """Starts to move the parts `leaving` of this role, together with the parameters of `others`. The parts leave
        immediately.

        Each trained role moves separately: the states of two roles are never on the device together.
        """
        models = [part for model in (self.model, *others) for part in get_parts(model)]
        self.residence = Residence(
            leaving, self.info.device, self.timers, models, self.optimizer, host_threads(self.config)
        )
        if self.config.checkpoint.memory_dir is not None:
            _ = self._memory  # takes its memory while the engines start
        self.residence.release(*PARTS)  # engines that start now measure the free memory
        return self.residence

    def save(
        self,
        rollout_id: int,
        then: Callable[[], None] | None = None,
        background: BackgroundSaves | None = None,
    ) -> None:
        """Writes the role's checkpoint as iteration `rollout_id`, in the `background` if it is given, and calls `then`
        while the weights are on the device. Collective; the checkpoint appears only when complete."""
        directory = self.role.saves_to(self.config)
        assert directory is not None
        self.residence.bring("parameters", "optimizer", timer="save_onload")
        optimizer = None if self.config.checkpoint.no_save_optim else self.optimizer
        extra = {"rollout_id": rollout_id}
        checkpoint.save_checkpoint(
            *(directory, rollout_id, self.model, optimizer, self.scheduler),
            extra=extra,
            flag=self.role.save_flag,
            background=background,
            published=lambda: after_save(self.config, directory),
            write_more=self._save_peft if self.config.lora.lora_rank and self.role is POLICY else None,
        )
        if then is not None:
            then()
        self.residence.release("parameters", "optimizer", timer="save_offload")

    @cached_property
    def _memory(self) -> MemoryStore:
        flags = self.config.checkpoint
        kept = flags.restart_iteration if flags.restart_dir is not None else None
        folder = Path(require_value(flags.memory_dir)) / self.role.name
        minutes = self.config.cluster.distributed_timeout_minutes
        return MemoryStore(folder, self._state(), host_threads(self.config), minutes, kept)

    def _state(self) -> State:
        has_adapters = Lora.of(self.config) is not None
        return collect_state(get_parts(self.model), self.optimizer, self.info.device, adapters=has_adapters)

    def _load_from_memory(self) -> None:
        record = self._memory.load(self._state())
        restore_record(record, self.optimizer, self.scheduler, rng=self.role is POLICY)

    def save_in_memory(self, rollout_id: int) -> None:
        """Copies the role's state into the host's memory."""
        self.residence.bring("parameters", "optimizer", timer="store_onload")
        self._memory.save(rollout_id, self._state(), make_record(self.optimizer, self.scheduler))
        self.residence.release("parameters", "optimizer", timer="store_offload")

    def _save_peft(self, folder: Path) -> None:
        save_peft(self.model, folder / FOLDER, self.config.rollout.hf_checkpoint, flag=self.role.save_flag)

    def close(self) -> None:
        """Drops the model and its optimizer, which hold process groups."""
        if self.config.checkpoint.memory_dir is not None:
            self._memory.close()
        self.residence.close()
        close_optimizer(self.optimizer)
        vars(self).clear()
