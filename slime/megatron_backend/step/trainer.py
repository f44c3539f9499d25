"""One trainer rank: Megatron model, reference model, optimizer and checkpoints behind five calls.

    train(rollout_id, data) -> TrainResult      next_weights(version) -> WeightUpdate | None
    save(rollout_id)                            weights_file()           start_rollout_id    close()

Owns the order of a training step. The maths is in slime.algo and rl_kernel, the model in this folder's other files.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from slime import operators
from slime.algo.importance import sequence_mean
from slime.algo.losses import loss_of
from slime.algo.needs import needs_reference
from slime.algo.ppo import compute_advantages_and_returns
from slime.checkpoints import checkpoint_dir
from slime.config import Config
from slime.config.sections.cluster import PARTS
from slime.config.sections.debug import profiled_steps
from slime.data import columns
from slime.data.packing import MicroBatch, pack, shares_prompts
from slime.divergence import DivergedError
from slime.hooks import load_function
from slime.megatron_backend.checkpoint import distributed as checkpoint
from slime.megatron_backend.checkpoint.weights import export_hf, load_weights, save_hf
from slime.megatron_backend.model.gpt import build_model, parts_of, unwrapped
from slime.megatron_backend.model.model_config import load_hf_config
from slime.megatron_backend.model.optimizer import build_optimizer, finish_grads
from slime.megatron_backend.parallel import destroy_parallel, init_parallel
from slime.megatron_backend.step.audit import Audit
from slime.megatron_backend.step.finite import require_finite_log_probs, require_finite_weights
from slime.megatron_backend.step.forward import log_probs_of_data
from slime.megatron_backend.step.head import LmHead, MicroBatchLoss, lm_head
from slime.megatron_backend.step.loss import LossSetup, micro_batch_loss, reduce_metrics
from slime.megatron_backend.step.old_log_probs import OldLogProbs, later_micro_batches
from slime.megatron_backend.step.out_of_memory import explained
from slime.megatron_backend.step.pipeline import from_last_stage, run_stages
from slime.megatron_backend.step.prediction import Predictions
from slime.megatron_backend.step.residence import Residence
from slime.megatron_backend.step.routing_replay import Replay
from slime.plan.memory_decision import decide_residence
from slime.plan.memory_estimate import estimate
from slime.protocols import TrainResult, WeightUpdate
from slime.tracking.memory import device_memory, resident_peak_gib
from slime.tracking.profiler import StepProfiler
from slime.tracking.timers import Timers
from slime.types import TrainData
from slime.weight_sync.channel import TrainerPlace
from slime.weight_sync.publisher import Publisher


class MegatronTrainer:
    """Each rank builds one, in its own process. `init_method` is a torch.distributed rendezvous address."""

    def __init__(
        self, config: Config, rank: int, world_size: int, *, init_method: str, local_rank: int = 0
    ) -> None:
        self.config, self.args = config, config.namespace()
        self.loss = loss_of(config.algorithm)
        self.temperature = config.rollout.rollout_temperature if self.loss.rewarded else 1.0
        self.info = init_parallel(rank, world_size, config, init_method=init_method, local_rank=local_rank)
        operators.install(config)
        self.decisions = operators.decide(config, self.info.device.type)
        self._hook("custom_megatron_init_path", self.args)
        self.hf_config = load_hf_config(config.rollout.hf_checkpoint)
        predicts = config.algorithm.enable_mtp_training
        # Megatron's wrapper has no types.
        self.model: Any = build_model(self.hf_config, config, predicts=predicts)
        load = config.checkpoint.load
        resume = checkpoint_dir.resumed_iteration(config)
        if resume is None:
            load_weights(
                self.model, checkpoint_dir.start_directory(config), checkpoint_dir.start_iteration(config)
            )
        self.optimizer, self.scheduler = build_optimizer(self.model, config, total_steps=config.total_steps)
        self.start_rollout_id = config.data.start_rollout_id or 0
        if load and resume is not None:
            extra = checkpoint.load_checkpoint(
                *(load, self.model, self.optimizer, self.scheduler),
                iteration=resume,
                optim=not config.checkpoint.no_load_optim,
                rng=not config.checkpoint.no_load_rng,
            )
            self.start_rollout_id = checkpoint_dir.first_rollout(config, extra["rollout_id"])
        self.ref_model = None
        if needs_reference(config):
            self.ref_model = build_model(self.hf_config, config, ddp=False)
            reference = config.checkpoint.ref_load or config.rollout.hf_checkpoint
            load_weights(self.ref_model, reference, config.checkpoint.ref_ckpt_step)
        self.timers = Timers.on(self.info.device)
        self.head = self._head(operators.loss_head(config)[0], self.model)
        ahead = Predictions(self.head, config.algorithm.mtp_loss_scaling_factor) if predicts else None
        self.loss_setup = LossSetup(config, self.args, self.head, self.timers, ahead)
        self.estimate = estimate(config, self.hf_config)
        self.memory = decide_residence(config, self.estimate, device_memory(self.info.device))
        models = [*parts_of(self.model), *([] if self.ref_model is None else parts_of(self.ref_model))]
        self.residence = Residence(self.memory.leaving, self.info.device, self.timers, models, self.optimizer)
        self.residence.release(*PARTS)  # engines that start now measure what memory is left
        self.publisher = self._publisher(config)
        self.version = self.start_rollout_id  # how many rollouts the current weights were trained on
        self.audit = Audit(config, self.info, self.timers, self.temperature)
        self.old = OldLogProbs(self.info)
        self.replay = Replay(config, self.info)
        steps = profiled_steps(config.debug.profile_steps)
        self.profiler = StepProfiler(steps, config.logging.run_dir, rank, self.timers, self.info.device)
        self.progress = (0, 0)  # of this rollout: micro-batches trained, micro-batches in total

    def train(self, rollout_id: int, data: TrainData) -> TrainResult:
        """All optimizer steps of one rollout over this rank's part of it. Collective over all ranks."""
        doing = self._explained(f"training rollout {rollout_id}")
        with doing, self.profiler.around(rollout_id), self.timers.measure("trainer"):
            self.residence.bring(*PARTS)
            try:
                steps, rollout = self._train(rollout_id, data)
            except DivergedError as error:
                raise error.with_checkpoint(self.config.checkpoint.save) from None
            self.residence.release("gradients", "optimizer")  # `next_weights` releases the parameters
        self.version = rollout_id + 1
        if self.config.cluster.colocate and self.info.device.type == "cuda":
            torch.cuda.empty_cache()  # the allocator's cached blocks: the engine's keys and values come here
        perf = self.timers.flush()
        perf |= self.residence.metrics(perf) | self.estimate.compared(perf)
        if (resident := resident_peak_gib()) is not None:
            perf["perf/trainer_rss_gib"] = resident
        operated = from_last_stage(self.info, operators.step_metrics())  # other stages have no head
        return TrainResult(steps=steps, rollout=rollout, perf=perf | operated)

    def _train(self, rollout_id: int, data: TrainData) -> tuple[list[dict[str, float]], dict[str, float]]:
        """Metrics of each optimizer step, and means over the rollout. Timers measure every part."""
        with self.timers.measure("data_preprocess"):
            self._to_device(data)
            self._hook("rollout_data_postprocess_path", self.args, rollout_id, data)
        self._add_log_probs(data)
        with self.timers.measure("advantages"):
            self._add_advantages(data)
        self.progress = (0, len(data["micro_batch_indices"]))
        audited: dict[str, float] = {}
        with self.audit.watch(rollout_id, data, audited), self.timers.measure("actor_train"):
            with self.timers.measure("step_metrics"):
                require_finite_log_probs(rollout_id, data | self.old.known)
            steps = self._optimizer_steps(rollout_id, data)
        self.replay.forget()
        self._update_reference(rollout_id)
        with self.timers.measure("rollout_metrics"):
            return steps, self._rollout_means(data, steps) | audited

    def save(self, rollout_id: int) -> None:
        """Checkpoint under --save (and --save-hf) as iteration `rollout_id`. Collective; appears only when complete."""
        flags, source = self.config.checkpoint, self.config.rollout.hf_checkpoint
        assert flags.save is not None
        optimizer = None if flags.no_save_optim else self.optimizer
        extra = {"rollout_id": rollout_id}
        with self._explained(f"saving rollout {rollout_id}"):
            self.residence.bring("parameters", "optimizer", timer="save_onload")
            checkpoint.save_checkpoint(
                flags.save, rollout_id, self.model, optimizer, self.scheduler, extra=extra
            )
            if flags.save_hf:
                out = Path(flags.save_hf.format(rollout_id=rollout_id))
                save_hf(self.model, source, out)
            self.residence.release("parameters", "optimizer", timer="save_offload")

    def _publisher(self, config: Config) -> Publisher:
        # half: the error that names an engine that hangs comes before those of the other ranks, which wait for rank 0
        timeout_s = 30.0 * config.cluster.distributed_timeout_minutes
        flags = config.weight_update
        assert flags.weight_dir is not None
        directory, size = Path(flags.weight_dir), flags.update_weight_buffer_size
        place = TrainerPlace(directory, size, self.info.device, timeout_s)
        compare = flags.check_weight_update_equal
        return Publisher.of(flags.update_weight_transport, place, self._export, compare=compare)

    def next_weights(self, version: int, receivers: dict[str, int]) -> WeightUpdate | None:
        """The next part of the current weights, called `version`; None after the last (see Publisher). Collective."""
        with self._explained(f"publishing weights {version}"):
            part = self.publisher.next(version, receivers)
            if part is None:
                self.residence.release("parameters", timer="weights_offload")
        return part

    def weights_file(self) -> WeightUpdate:
        """The current weights in a file, for an engine that starts between two updates. Collective."""
        return self.publisher.file(self.version)

    def _export(self) -> Iterator[tuple[str, Tensor]]:
        return export_hf(self.model, self.residence.read)

    def _explained(self, doing: str) -> AbstractContextManager[None]:
        return explained(doing, self.config, self.estimate, self.timers)

    def close(self) -> None:
        """Free the model, the optimizer and the groups, with their threads and files. A second call does nothing."""
        if vars(self):
            self.residence.close()
            vars(self).clear()
            destroy_parallel()

    def _hook(self, flag: str, *args: Any) -> None:
        if path := self.config.value_of(flag):
            load_function(path, flag="--" + flag.replace("_", "-"))(*args)

    def _to_device(self, data: TrainData) -> None:
        """Tensors to the device (the packer reads `tokens` on the host), and the denominator of every token in the
        loss: `max(rollout_mask_sum, 1) * global_batch_size`, or with --calculate-per-token-loss the step's tokens.
        """
        for name in [column.name for column in columns.present(data, "response")]:
            joined = torch.cat(data[name]).to(self.info.device)  # in one copy: each waits for the device
            data[name] = list(joined.split([len(tensor) for tensor in data[name]]))
        per_token = self.config.algorithm.calculate_per_token_loss
        data["normalisers"] = data["global_token_counts"] if per_token else data["global_batch_sizes"]
        step_of_micro_batch = [s for s, n in enumerate(data["num_microbatches"]) for _ in range(n)]
        data["loss_denominators"] = [None] * len(data["tokens"])
        for step, samples in zip(step_of_micro_batch, data["micro_batch_indices"], strict=True):
            for i in samples:
                of_rollout = 1.0 if per_token else max(data["rollout_mask_sums"][i], 1.0)
                data["loss_denominators"][i] = torch.full_like(
                    data["loss_masks"][i], of_rollout * data["normalisers"][step], dtype=torch.float32
                )

    def _pack(
        self, data: TrainData, samples: list[int], *, training: bool, policy: bool = True
    ) -> MicroBatch:
        """A micro-batch for training or for log-probs. `policy`: for the policy, which may replay experts; a reference
        model chooses its own experts."""
        info = self.info
        batch = pack(
            data,
            samples,
            columns.carried(data, self.config, training=training, policy=policy),
            device=info.device,
            # sequence parallelism cuts the packed row into equal parts
            multiple=info.tp_size if self.config.megatron.sequence_parallel else 1,
            cp_rank=info.cp_rank,
            cp_size=info.cp_size,
            share_prompts=shares_prompts(self.config, self.hf_config),
        )
        if policy:
            self.replay.attach(batch, training=training)
        return batch

    def _head(self, kind: operators.Head, model: Any) -> LmHead:
        workspace_bytes = self.config.kernels.rl_kernel_workspace_mib * 2**20
        return lm_head(kind, model, self.info, temperature=self.temperature, workspace_bytes=workspace_bytes)

    def _forward_log_probs(
        self, model: Any, data: TrainData, prefix: str, micro_batches: list[list[int]]
    ) -> dict[int, Tensor]:
        """Log-probs by `model`, by sample of `micro_batches`. `prefix` ("ref_" or "") names the column for
        --custom-megatron-before-log-prob-hook-path."""
        self._hook("custom_megatron_before_log_prob_hook_path", self.args, parts_of(model), prefix)
        policy = model is self.model
        return log_probs_of_data(
            self._head(operators.pass_head(self.config), model),
            (self._pack(data, samples, training=False, policy=policy) for samples in micro_batches),
            len(micro_batches),
            data["response_lengths"],
            sorted(i for samples in micro_batches for i in samples),
        )

    def _add_log_probs(self, data: TrainData) -> None:
        """Add ref_log_probs where a KL needs them, and old_log_probs where those of the first step cannot serve."""
        config, everything = self.config, data["micro_batch_indices"]
        if self.ref_model is not None:
            with self.timers.measure("ref_log_probs"):
                found = self._forward_log_probs(self.ref_model, data, "ref_", everything)
            data["ref_log_probs"] = [found[i] for i in range(len(found))]
        if not self.loss.rewarded:
            return
        if config.off_policy.use_rollout_logprobs:
            data["old_log_probs"] = data["rollout_log_probs"]
        elif operators.before_first_step(config, len(data["num_microbatches"])):
            with self.timers.measure("log_probs"):
                found = self._forward_log_probs(self.model, data, "", everything)
            data["old_log_probs"] = [found[i] for i in range(len(found))]
            data["log_probs"] = data["old_log_probs"]  # the name that advantage hooks read
        elif later := later_micro_batches(data):
            with self.timers.measure("log_probs"):
                self.old.expect(self._forward_log_probs(self.model, data, "", later))

    def _add_advantages(self, data: TrainData) -> None:
        if self.config.algorithm.disable_compute_advantages_and_returns or not self.loss.rewarded:
            return
        if self.config.algorithm.custom_advantage_function_path:
            return self._hook("custom_advantage_function_path", self.args, data)
        compute_advantages_and_returns(self.args, data, dp_group=self.info.dp_group)

    def _optimizer_steps(self, rollout_id: int, data: TrainData) -> list[dict[str, float]]:
        steps, first = [], 0
        for step_id, count in enumerate(data["num_microbatches"]):
            self._hook(
                "custom_megatron_before_train_step_hook_path",
                *(self.args, rollout_id, step_id, parts_of(self.model), self.optimizer, self.scheduler),
            )
            micro_batches = data["micro_batch_indices"][first : first + count]
            steps.append(self._optimizer_step(rollout_id, data, micro_batches, step_id))
            first += count
        with self.timers.measure("optimizer"):
            require_finite_weights(rollout_id, self.model.parameters())
        return steps

    def _optimizer_step(
        self, rollout_id: int, data: TrainData, micro_batches: list[list[int]], step_id: int
    ) -> dict[str, float]:
        global_batch_size = data["global_batch_sizes"][step_id]
        with self.timers.measure("optimizer"):
            self.model.train()
            self.model.zero_grad_buffer()
            self.optimizer.zero_grad()
        done = self.progress[0]
        batches = self._training_batches(data, micro_batches)

        def on_output(batch: MicroBatch, output: Tensor) -> tuple[Tensor, MicroBatchLoss]:
            loss = micro_batch_loss(self.loss_setup, data, batch, output, data["normalisers"][step_id])
            readers = [self.audit] * self.audit.wants(data, step_id) + [self.old] * self.old.wants(step_id)
            if loss.log_probs is not None and readers:
                with self.timers.measure("policy_loss"):
                    log_probs = self.head.all_rows(batch, loss.log_probs)
                    for reader in readers:
                        reader.add(data, batch, log_probs)
            return loss.loss, replace(loss, loss=loss.loss.detach())  # the backward ends the use of the graph

        losses = run_stages(self.model, self.info, batches, len(micro_batches), on_output, self.timers)
        self.progress = (done + len(micro_batches), self.progress[1])
        if self.old.wants(step_id):
            self.old.complete(data)
        with self.timers.measure("reduce_grads"):
            finish_grads(self.model)
        with self.timers.measure("optimizer"):
            updated, grad_norm, _ = self.optimizer.step()
        if not (updated and math.isfinite(grad_norm)):
            raise DivergedError(
                f"gradients must be finite, got norm {grad_norm} in step {step_id} of rollout {rollout_id}",
                rollout_id,
            )
        rates = {
            f"train/lr-pg_{i}": group["lr"] for i, group in enumerate(self.optimizer.param_groups)
        }  # before `scheduler.step`: the rate that this step used
        self.scheduler.step(increment=global_batch_size)
        with self.timers.measure("step_metrics"):
            reduced = reduce_metrics(losses, self.head.loss_group) if losses else {}
            metrics = from_last_stage(self.info, reduced)
            metrics |= self.replay.metrics()
        return {
            **metrics,
            "train/grad_norm": float(grad_norm),
            "train/global_batch_size": global_batch_size,
            **rates,
        }

    def _training_batches(self, data: TrainData, micro_batches: list[list[int]]) -> Iterator[MicroBatch]:
        """The packed micro-batches of a step. `progress` counts the micro-batches that were taken."""
        done, total = self.progress
        for k, samples in enumerate(micro_batches):
            self.progress = (done + k, total)
            with self.timers.measure("pack"):
                batch = self._pack(data, samples, training=True)
            yield batch

    def _update_reference(self, rollout_id: int) -> None:
        interval = self.config.algorithm.ref_update_interval
        if self.ref_model is not None and interval and (rollout_id + 1) % interval == 0:
            with self.timers.measure("ref_model_update"):
                for kept, trained in zip(unwrapped(self.ref_model), unwrapped(self.model), strict=True):
                    kept.load_state_dict(trained.state_dict())

    def _rollout_means(self, data: TrainData, steps: list[dict[str, float]]) -> dict[str, float]:
        """rollout/*: means over the samples of all ranks. Of a per-token column, a sample contributes the mean over its
        trained tokens."""
        count, device = len(data["tokens"]), self.info.device
        mask = torch.cat(data["loss_masks"])
        lengths = torch.tensor([len(m) for m in data["loss_masks"]])
        sample_of_row = torch.repeat_interleave(torch.arange(count), lengths).to(device)
        sums = {
            name: sequence_mean(torch.cat(data[name]).double(), mask, sample_of_row, count).sum()
            for name in columns.reported(data, self.config, "response")
        }
        plain = {name: float(sum(data[name])) for name in columns.reported(data, self.config, "sample")}
        on_host = torch.tensor([*plain.values(), count], dtype=torch.float64).to(device)
        total = torch.cat([torch.stack(list(sums.values())), on_host]) if sums else on_host
        dist.all_reduce(total, group=self.info.dp_group)
        *found, samples = total.tolist()
        means = {f"rollout/{name}": x / samples for name, x in zip([*sums, *plain], found, strict=True)}
        if "rollout/log_probs" not in means and "train/log_probs" in steps[0]:
            means["rollout/log_probs"] = steps[0]["train/log_probs"]
        for step in steps:
            step.pop("train/log_probs", None)
        return means
