"""A trainer rank. It owns the models, trains them, evaluates them and saves checkpoints, in six calls.

    train(rollout_id, data) -> TrainResult      next_weights(version) -> WeightUpdate | None
    evaluate(rollout_id, sets) -> metrics       weights_file()           start_rollout_id
    save(rollout_id)                            close()

If other ranks have some of the roles (slime.roles.groups), a step has two calls. The ranks exchange columns between the
calls:

    score(rollout_id, data) -> columns          train(rollout_id, data, columns of the others) -> TrainResult

The module owns the order of a training step. The maths is in slime.algo and rl_kernel, the parts of a step in this
folder's other files.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager

import torch

from slime import operators
from slime.algo.distillation import subtract_penalties
from slime.algo.losses import loss_for
from slime.algo.ppo import compute_advantages_and_returns
from slime.checkpoints import checkpoint_dir
from slime.checkpoints.divergence import DivergedError
from slime.config import Config
from slime.config.hook_calls import Hooks
from slime.config.sections.cluster import PARTS
from slime.config.sections.debug import profiled_steps
from slime.data.rank_data import RankData, rollout_means
from slime.megatron_backend.model.model_config import load_hf_config
from slime.megatron_backend.model.optimizer import reset_states
from slime.megatron_backend.parallel import destroy_parallel, init_parallel
from slime.megatron_backend.receipts import ReceiptRecorder
from slime.megatron_backend.step.audit import Audit
from slime.megatron_backend.step.batches import Batches
from slime.megatron_backend.step.heads import get_temperature
from slime.megatron_backend.step.held_out import HeldOut
from slime.megatron_backend.step.learner import Learner, Training
from slime.megatron_backend.step.models import Models
from slime.megatron_backend.step.out_of_memory import explained
from slime.megatron_backend.step.outputs import Outputs
from slime.megatron_backend.step.pipeline import from_last_stage
from slime.megatron_backend.step.policy import PolicyTraining
from slime.megatron_backend.step.routing_replay import Replay
from slime.megatron_backend.step.scorers import OldLogProbs, build_scorers
from slime.megatron_backend.step.values import CriticTraining
from slime.plan.memory_estimate import estimate
from slime.protocols import TrainResult, WeightUpdate
from slime.roles import CRITIC, POLICY
from slime.roles.groups import name_group, read_by, sent_by
from slime.rollout.debug_data import save_debug_train_data
from slime.tracking import outbox
from slime.tracking.events import Events, Spans
from slime.tracking.memory import reserved_gib, resident_peak_gib
from slime.tracking.profiler import StepProfiler
from slime.tracking.timers import Timers
from slime.tracking.traces.memory_history import MemoryHistory


class MegatronTrainer:
    """The trainer of a rank. Each rank builds one, in its own process. `init_method` is a torch.distributed rendezvous
    address."""

    def __init__(
        self, config: Config, rank: int, world_size: int, *, init_method: str, local_rank: int = 0
    ) -> None:
        self.config, self.hooks = config, Hooks(config)
        outbox.begin()
        self.info = init_parallel(rank, world_size, config, init_method=init_method, local_rank=local_rank)
        operators.install(config)
        self.decisions = operators.decide(config, self.info.device.type)
        self.hooks.call("custom_megatron_init_path")
        self.hf_config = load_hf_config(config.rollout.hf_checkpoint)
        self.timers = Timers.on(self.info.device)
        self.memory_history = MemoryHistory(config, f"{name_group(config)}-{rank}")
        self.events = Events(f"{name_group(config)}-{rank}", config.logging.run_dir)
        self.timers.observer = self.spans = Spans(self.events, str(self.info.device))
        with explained("loading", config, estimate(config, self.hf_config), self.timers):
            self.models = Models(config, self.hf_config, self.info, self.timers)
        self.start_rollout_id = config.data.start_rollout_id or 0
        if config.checkpoint.restart_iteration is not None:
            self.start_rollout_id = config.checkpoint.restart_iteration + 1
        elif (resumed := self.models.main.resumed) is not None:
            self.start_rollout_id = checkpoint_dir.first_rollout(config, resumed["rollout_id"])
        self.outputs = Outputs(
            config, self.hooks, self.models, self.info.device, self.start_rollout_id, self._explained
        )
        self.replay = Replay(config, self.info)
        self.batches = Batches(config, self.hf_config, self.info, self.replay, self.timers)
        self.scorers = build_scorers(config, self.hooks, self.models, self.info, self.batches, self.timers)
        self.receipt: ReceiptRecorder | None = None
        if config.debug.receipt:
            self.receipt = ReceiptRecorder(config, self.info, name_group(config))
            self.receipt.begin(self.models.learners, self.start_rollout_id)
        self.trainings = self._trainings()
        self.held_out: HeldOut | None = None
        steps, name = profiled_steps(config.debug.profile_steps), f"{name_group(config)}-{rank}"
        self.profiler = StepProfiler(steps, config.logging.run_dir, name, self.timers, self.info.device)
        self._scored_at: float | None = None

    @property
    def policy(self) -> Learner:
        """Returns the policy. Call it only on ranks that have the policy."""
        return self.models.learners[POLICY.name]

    def _trainings(self) -> list[Training]:
        """Returns the objects that train the learners, in order."""
        config, learners, found = self.config, self.models.learners, list[Training]()
        if (critic := learners.get(CRITIC.name)) is not None:
            found.append(CriticTraining(config, critic, self.batches))
        if (policy := learners.get(POLICY.name)) is not None:
            old = next((scorer for scorer in self.scorers if isinstance(scorer, OldLogProbs)), None)
            audit = Audit(config, self.info, self.timers, get_temperature(config))
            parts = self.hooks, policy, self.batches, self.replay, audit, old, self.receipt
            found.append(PolicyTraining(config, *parts))
        return found

    @property
    def progress(self) -> tuple[int, int]:
        """Returns the number of trained micro-batches of this rollout, and their total."""
        return self.batches.progress

    def score(self, rollout_id: int, data: RankData) -> RankData:
        """Runs only the passes of a step, before `train` of the same data. Returns the columns for other ranks.
        Collective."""
        self.spans.set_rollout(rollout_id)
        doing = self._explained(f"scoring rollout {rollout_id}")
        trace = self.profiler.around(rollout_id, "passes")
        with doing, self.memory_history.around(), trace, self.timers.measure("trainer"):
            self._score(rollout_id, data)
            filled = data.filled(sent_by(self.config))
        self._scored_at = time.perf_counter()
        return filled

    def train(self, rollout_id: int, data: RankData, received: Sequence[RankData] = ()) -> TrainResult:
        """Runs all optimizer steps of a rollout over this rank's part of the data. `received` has columns from other
        ranks, after `score`. Collective over all ranks."""
        waited_s = 0.0 if self._scored_at is None else time.perf_counter() - self._scored_at
        self.spans.set_rollout(rollout_id)
        doing = self._explained(f"training rollout {rollout_id}")
        trace = self.profiler.around(rollout_id)
        with doing, self.memory_history.around(), trace, self.timers.measure("trainer"):
            if self._scored_at is None:
                self._score(rollout_id, data)
            data.receive(received, self.info.device)
            self._scored_at = None
            try:
                steps, rollout = self._train(rollout_id, data)
            except DivergedError as error:
                raise error.with_checkpoint(self.config.checkpoint.save) from None
            # `next_weights` releases the parameters
            self.models.main.residence.release("gradients", "optimizer")
        self.outputs.version = rollout_id + 1
        self.memory_history.trained(rollout_id)
        reserved = reserved_gib(self.info.device)
        if self.config.cluster.colocate and self.info.device.type == "cuda":
            torch.cuda.empty_cache()  # frees the allocator's cached blocks for the engine's keys and values
        perf = self.timers.flush() | reserved
        perf |= self.models.metrics(perf) | ({"perf/columns_wait_time": waited_s} if waited_s else {})
        if (resident := resident_peak_gib()) is not None:
            perf["perf/trainer_rss_gib"] = resident
        operated = from_last_stage(self.info, operators.step_metrics())  # other stages have no head
        return TrainResult(steps=steps, rollout=rollout, perf=perf | operated, logged=outbox.take())

    def _score(self, rollout_id: int, data: RankData) -> None:
        """Moves the data to the device and fills the columns of this rank's roles."""
        if self.receipt is not None:
            with self.timers.measure("receipt"):
                self.receipt.note_inputs(data)
        self.models.bring()
        with self.timers.measure("data_preprocess"):
            flags = self.config.algorithm
            length = flags.dr_grpo_length if flags.use_dr_grpo else None
            data.to_device(self.info.device, per_token=flags.calculate_per_token_loss, length=length)
            self.hooks.call("rollout_data_postprocess_path", rollout_id, data)
        for scorer in self.scorers:
            scorer.fill(data)

    def _train(self, rollout_id: int, data: RankData) -> tuple[list[dict[str, float]], dict[str, float]]:
        """Returns the metrics per optimizer step, and means over the rollout. Timers measure every part."""
        data.reach("scored", read_by(self.config), "the loss")
        with self.timers.measure("advantages"):
            self.add_advantages(data)
        steps, more = self._train_roles(rollout_id, data)
        if self.receipt is not None:
            self.receipt.add_column(data)
        template = self.config.debug.save_debug_train_data
        if template is not None and POLICY.name in self.models:  # the policy's ranks have every column
            save_debug_train_data(template, rollout_id, self.info.rank, data)
        if self.receipt is not None:
            with self.timers.measure("receipt"):
                self.receipt.finish(rollout_id, data, steps)
        self.replay.forget()
        self.batches.towers.clear()
        self.models.update_reference(rollout_id)
        with self.timers.measure("rollout_metrics"):
            return steps, self._rollout_means(data, steps) | more

    def evaluate(self, rollout_id: int, sets: Mapping[str, RankData]) -> dict[str, float]:
        """Returns eval/{set}/* of held-out sets with the weights after `rollout_id` rollouts. Collective over all
        ranks. The metrics of training do not change."""
        residence = self.models.main.residence
        away = "parameters" in residence.away
        doing = self._explained(f"evaluating after {rollout_id} rollouts")
        phase = self.events.phase("eval", device=str(self.info.device), rollout=rollout_id)
        with doing, phase:
            residence.bring("parameters")
            if self.held_out is None:
                self.held_out = HeldOut(self.config, self.hooks, self.policy, self.models, self.batches)
            means = {name: self.held_out.means(data) for name, data in sets.items()}
            self.batches.towers.clear()
            if away:
                residence.release("parameters")
        operators.step_metrics()  # the calls of the next step count from 0
        return {
            f"eval/{name}/{metric}": value
            for name, of_set in means.items()
            for metric, value in of_set.items()
        }

    def add_advantages(self, data: RankData) -> None:
        """Adds the columns of the advantage estimator, or the columns of a hook. Collective over data-parallel
        ranks."""
        flags = self.config.algorithm
        if not flags.disable_compute_advantages_and_returns and loss_for(flags).rewarded:
            if flags.custom_advantage_function_path:
                self.hooks.call("custom_advantage_function_path", data)
                subtract_penalties(self.hooks.config.distillation, data)
            else:
                compute_advantages_and_returns(self.hooks.config, data, dp_group=self.info.dp_group)
        data.reach("advantages")

    def _train_roles(
        self, rollout_id: int, data: RankData
    ) -> tuple[list[dict[str, float]], dict[str, float]]:
        """Returns the metrics per optimizer step of the trained roles, and further metrics of the rollout."""
        trainings = [training for training in self.trainings if rollout_id >= training.first_rollout]
        self.batches.begin(len(data.micro_batches) * len(trainings))
        steps: list[dict[str, float]] = [{"train/global_batch_size": n} for n in data.global_batch_sizes]
        more: dict[str, float] = {}
        for training in trainings:
            training.learner.residence.bring(*PARTS)
            if self.config.megatron.reset_optimizer_states:
                reset_states(training.learner.optimizer)
            found, of_rollout = training.train(rollout_id, data)
            if self.receipt is not None:
                with self.timers.measure("receipt"):
                    self.receipt.note_state(training.learner)
            if training.learner is not self.models.main:  # the policy's weights are published first
                training.learner.residence.release(*PARTS)
            steps = [step | of_step for step, of_step in zip(steps, found, strict=True)]
            more |= of_rollout
        return steps, more

    def _rollout_means(self, data: RankData, steps: list[dict[str, float]]) -> dict[str, float]:
        if POLICY.name not in self.models:
            return {}
        means = rollout_means(data, self.config, self.info.dp_group)
        if "rollout/log_probs" not in means and "train/log_probs" in steps[0]:
            means["rollout/log_probs"] = steps[0]["train/log_probs"]
        for step in steps:
            step.pop("train/log_probs", None)
        return means

    def save(self, rollout_id: int) -> None:
        """Saves checkpoints under --save (and --save-hf) as iteration `rollout_id`. Collective."""
        with self.events.phase("save", device=str(self.info.device), rollout=rollout_id):
            self.outputs.save(rollout_id)
            if self.receipt is not None:
                self.receipt.note_checkpoint(rollout_id)

    def save_in_memory(self, rollout_id: int) -> None:
        """Writes the checkpoint of --recover-from memory after `rollout_id`. Collective."""
        with self.events.phase("save_in_memory", device=str(self.info.device), rollout=rollout_id):
            self.outputs.save_in_memory(rollout_id)

    def finish_save(self) -> None:
        """Returns when the files of an asynchronous save are complete. Collective."""
        self.outputs.finish_save()

    def next_weights(self, version: int, receivers: dict[str, int]) -> WeightUpdate | None:
        """Returns the next part of the current weights, called `version`, or None after the last part. Collective."""
        return self.outputs.next_weights(version, receivers)

    def weights_file(self) -> WeightUpdate:
        """Returns the current weights in a file, for an engine that starts between two updates. Collective."""
        return self.outputs.weights_file()

    def _explained(self, doing: str) -> AbstractContextManager[None]:
        return explained(doing, self.config, self.models.estimate, self.timers)

    def close(self) -> None:
        """Frees the models, the optimizers and the groups, with their threads and files. A second call does nothing."""
        if vars(self):
            self.events.close()
            self.outputs.close()
            self.models.close()
            vars(self).clear()
            destroy_parallel()
