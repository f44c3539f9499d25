"""The rollout manager turns prompts into training data. A run has one manager, in its own process.

It owns the data source, the generation state and the conversion to train data. Its engine has the methods of
`slime.protocols.RolloutEngine`. It does not use Ray: `slime.cluster.rollout_actor` sends its results.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from slime import operators
from slime.algo.losses import loss_for
from slime.algo.needs import before_first_step
from slime.checkpoints.divergence import DivergedError
from slime.checkpoints.hf_config import read_hf_config
from slime.config import Config
from slime.config.hook_calls import Hooks
from slime.data import columns
from slime.data.drawing.position import state_path
from slime.data.media.tower_work import sum_tower_work
from slime.data.rank_data import RankData, mark_saved_samples
from slime.data.sharing.flops import micro_batch_flops, prediction_flops
from slime.data.sharing.prompts import shares_prompts
from slime.data.tokenizer import load_tokenizer
from slime.data.train_data import check_samples, checked_data, held_out_data, scheduled
from slime.data.transport import count_bytes
from slime.hooks import load_function
from slime.peers import http
from slime.protocols import Evaluated, Logged, RolloutBatch, RolloutEngine
from slime.roles.groups import build_groups
from slime.rollout.base_types import call_rollout_fn
from slime.rollout.context import RunContext
from slime.rollout.debug_data import load_with_facts, save_debug_rollout_data
from slime.rollout.evaluation import load_eval_datasets
from slime.rollout.facts import Facts, attach, replay_template, run_facts
from slime.rollout.learning import learning_figures, learning_texts, spread
from slime.rollout.metrics import eval_metrics, rollout_metrics
from slime.rollout.sample_hooks import accepted
from slime.rollout.state import GenerateState
from slime.rollout.stream import stream
from slime.rollout.stream.groups import get_number
from slime.rollout.stream.remote import close_queue, leave_queue, note_checkpoint
from slime.rollout.stream.snapshot_start import begin_snapshots
from slime.rollout.stream.snapshots import Snapshots
from slime.rollout.vllm_rollout import generate_rollout
from slime.tracking import outbox
from slime.tracking.memory import resident_peak_gib
from slime.tracking.samples import choose_samples, shown_sample, token_texts, write_samples
from slime.types import Sample, SampleGroup

logger = logging.getLogger(__name__)
REWARD = "rollout/raw_reward"


class RolloutManager:
    """Draws, generates, scores and converts rollouts, one rollout at a time in call order. `evaluate` may run at the
    same time as a rollout.

    `engine` is an engine client, None for SFT and replay. `dp_size` is the number of the policy's data-parallel ranks.
    `facts` are run-time values that hooks may read from `args`, such as the router's address. In `facts`,
    `own_servers` holds the fields of `slime.peers.http.OwnServers`, and `frozen_engines` maps the names of the run's
    frozen models to their clients. `pack` converts a rank's data to the form that its trainer ranks get.
    """

    def __init__(
        self,
        config: Config,
        engine: RolloutEngine | None,
        dp_size: int,
        facts: Mapping[str, Any],
        pack: Callable[[RankData], object],
    ) -> None:
        self.config, self.pack = config, pack
        outbox.begin()
        further = [group.config.data_parallel_size for group in build_groups(config)[1:]]
        self.dp_sizes = [dp_size, *further]
        """The number of data-parallel ranks in each group of trainer ranks; the policy's group is first."""
        http.set_own_servers(*(http.OwnServers(**fields) for fields in facts.get("own_servers", ())))
        others: Mapping[str, RolloutEngine] = facts.get("frozen_engines", {})
        hidden = ("own_servers", "frozen_engines")
        self.hooks = Hooks(config, **{name: value for name, value in facts.items() if name not in hidden})
        self.args = self.hooks.args
        operators.install(config)
        checkpoint = config.rollout.hf_checkpoint
        tokenizer = load_tokenizer(checkpoint, trust_remote_code=config.train.trust_remote_code)
        parser = facts.get("chat_parser_path")
        self.state = GenerateState(
            *(config, engine, tokenizer, others), hook_args=self.args, chat_parser_path=parser
        ).enter()
        self.hf_config = read_hf_config(checkpoint)
        self._turn, self._spare = threading.Lock(), deque[int]()
        self._decode, self._text_of = tokenizer.decode, token_texts(tokenizer.decode)
        self.facts = run_facts(config, getattr(self.args, "rollout_engine_dtype", None))
        self.data_source = load_function(config.data.data_source_path, flag="--data-source-path")(self.args)
        self.rollout_function = load_function(
            config.rollout.rollout_function_path, flag="--rollout-function-path"
        )
        self.eval_function = load_function(config.evaluation.eval_function_path, flag="--eval-function-path")
        if config.evaluation.eval_config is not None or config.evaluation.eval_prompt_data:
            load_eval_datasets(self.state)  # so that a bad evaluation file fails at the start

    def load(self, start_rollout_id: int) -> None:
        """Restores the data position of the checkpoint whose next rollout is `start_rollout_id`."""
        self.data_source.load(start_rollout_id - 1)
        queued = self.config.rollout.rollout_data_transport == "straw"
        if self.config.logging.run_dir and (self.config.fault_tolerance.rollout_snapshot_s or queued):
            begin_snapshots(self.state, self.data_source, start_rollout_id)

    def serve_queue(self, host: str, ended: int) -> dict[str, int]:
        """Generates for the trainer of another process until its run has ended: see `RolloutHost.serve`."""
        from slime.rollout.straw.host import serve  # needs the package straw

        return serve(self.state, host, ended)

    def generate(self, rollout_id: int, saves: bool = False, *, may_be_last: bool = False) -> RolloutBatch:
        """Generates, scores, converts and splits one rollout.

        `saves` means that a checkpoint follows this rollout. The data position is saved here, because generation may
        be a rollout ahead when the model is saved. `may_be_last` means that a checkpoint follows if the user ends the
        run now.
        """
        began = time.perf_counter()
        with self.state.events.phase("rollout", rollout=rollout_id):
            groups, metrics, facts = self._groups(rollout_id)
        seconds = time.perf_counter() - began
        if saves or may_be_last:
            self._save_position(rollout_id)
        if saves:
            note_checkpoint(self.state, stream.outstanding(self.state))
        elif may_be_last:
            self._drop_older_positions(rollout_id)
        if self.config.debug.save_debug_rollout_data:
            save_debug_rollout_data(
                self.config.debug.save_debug_rollout_data, rollout_id, groups, facts=facts
            )
        with self._refused_is_saved(rollout_id, groups, facts):  # before metrics and records read the samples
            check_samples(self._with_hooks(), [sample for group in groups for sample in group])
        metrics, logged = self._log(rollout_id, groups, metrics, seconds)
        kept = self._keep_samples(rollout_id, groups)
        of_size, rows = self._rank_data(rollout_id, groups, facts)
        ranks = of_size[self.dp_sizes[0]]
        if rows == sum(map(len, groups)):  # A conversion hook may change the number of rows.
            mark_saved_samples(ranks, kept)
        metrics |= self._left_out(rollout_id, groups, rows, ranks)
        packed = {dp_size: [self.pack(data) for data in split] for dp_size, split in of_size.items()}
        rank_data = [data for dp_size in self.dp_sizes for data in packed[dp_size]]
        metrics |= operators.step_metrics()
        metrics["perf/make_data_time"] = time.perf_counter() - began - seconds
        if (resident := resident_peak_gib()) is not None:
            metrics["perf/rollout_rss_gib"] = resident
        self.state.events.add("handed", rollout=rollout_id)
        batch = self._batch(rank_data, metrics, ranks, [*outbox.take(), *logged])
        learning = learning_figures(self._with_hooks(), groups)
        texts = learning_texts(groups)
        size = sum(count_bytes(data) for split in of_size.values() for data in split)
        shown = shown_sample(groups)
        return replace(batch, learning=learning, learning_texts=texts, sample=shown, data_bytes=size)

    def _keep_samples(self, rollout_id: int, groups: list[SampleGroup]) -> list[int]:
        """Writes some samples for people to read (--save-samples), and returns their positions in the rollout."""
        keep, run_dir = self.config.logging.save_samples, self.config.logging.run_dir
        if not (keep and run_dir):
            return []
        key = self.config.reward.reward_key
        samples = [sample for group in groups for sample in group]
        indices = choose_samples(groups, [spread(group, key) for group in groups], keep)
        write_samples(
            Path(run_dir), rollout_id, samples, indices, self._text_of, self._decode, reward_key=key
        )
        return indices

    def _save_position(self, rollout_id: int) -> None:
        """Saves the data position. It includes groups that were drawn ahead: a run that resumes draws them first."""
        unfinished = stream.outstanding(self.state)
        known = accepted(self.data_source.save, outstanding=unfinished)
        if unfinished and not known:
            logger.warning(
                "--data-source-path: save(rollout_id, outstanding) does not take the %d groups that were drawn ahead; "
                "a run that resumes skips them",
                len(unfinished),
            )
        self.data_source.save(rollout_id, **known)
        self.state.events.add("position", rollout=rollout_id)

    def _drop_older_positions(self, rollout_id: int) -> None:
        """Removes positions without a checkpoint that are older than any future checkpoint. When rollout N is
        generated, the loop has trained all rollouts before N - `rollouts_ahead`."""
        self._spare.append(rollout_id)
        while self._spare[0] < rollout_id - self.config.rollouts_ahead - 1:
            state_path(self.args.save, self._spare.popleft()).unlink(missing_ok=True)

    def _log(
        self, rollout_id: int, groups: list[SampleGroup], metrics: dict[str, float], seconds: float
    ) -> tuple[dict[str, float], list[Logged]]:
        """Returns the metrics of a rollout and the metrics that --custom-rollout-log-function-path has logged.

        A true return value of that function removes the run's own metrics. The reward stays, because slime's trainer
        logs it in this case too, unless the function has logged a reward.
        """
        if loss_for(self.config.algorithm).rewarded:
            metrics = {**rollout_metrics(self._with_hooks(), groups, seconds), **metrics}
        else:
            metrics = {"perf/rollout_time": seconds, **metrics}
        path = self.config.rollout.custom_rollout_log_function_path
        if not path:
            return metrics, []
        samples = [sample for group in groups for sample in group]
        log = load_function(path, flag="--custom-rollout-log-function-path")
        with outbox.collected() as logged:
            done = log(rollout_id, self.args, samples, metrics, seconds)
        if done:
            own = {REWARD} - {name for one in logged for name in one.metrics}
            metrics = {name: value for name, value in metrics.items() if name in own}
        return metrics, logged

    def _batch(
        self,
        rank_data: list[object],
        metrics: dict[str, float],
        ranks: list[RankData],
        logged: list[Logged],
    ) -> RolloutBatch:
        """Returns the rollout for the trainers. Its counts exclude the samples of `_left_out`."""
        totals = [n for data in ranks for n in data["total_lengths"]]
        flops, old = map(sum, zip(*map(self._forward_flops, ranks), strict=True))
        ahead = 0.0
        if self.config.algorithm.enable_mtp_training:
            ahead = sum(prediction_flops(data, self.hf_config) for data in ranks)
        return RolloutBatch(
            rank_data,
            metrics,
            sum(totals),
            forward_flops=flops,
            old_flops=old,
            ahead_flops=ahead,
            tower_flops=sum_tower_work(self.config, self.hf_config, ranks),
            logged=logged,
        )

    def _with_hooks(self) -> Config:
        """Returns the configuration with the values that hooks have set in their `args`."""
        return RunContext.from_state(self.state).config

    def _forward_flops(self, data: RankData) -> tuple[float, float]:
        """Returns the FLOPs of a forward pass over a rank's samples, and of the pass for old log-probs."""
        carried = columns.carried(data, self.config, training=True, policy=True)
        shared = shares_prompts(self.config, self.hf_config)
        each = micro_batch_flops(data, carried, self.hf_config, share_prompts=shared)
        whole = before_first_step(self.config, len(data["num_microbatches"]))
        return sum(each), sum(each if whole else each[data["num_microbatches"][0] :])

    def _groups(self, rollout_id: int) -> tuple[list[SampleGroup], dict[str, float], Facts | None]:
        """Returns groups, their metrics, and the facts about their sampling (None if a saved rollout lacks them)."""
        if template := self.config.debug.load_debug_rollout_data:
            share = self.config.debug.load_debug_rollout_data_subsample
            groups, facts = load_with_facts(template, rollout_id, subsample=share)
            return groups, {}, facts
        concurrent = self.rollout_function is self.eval_function is generate_rollout
        with self._naming_checkpoint(), nullcontext() if concurrent else self._turn:
            output = call_rollout_fn(
                self.rollout_function, self.args, rollout_id, self.data_source, evaluation=False
            )
        metrics = output.metrics or {}
        if observe := getattr(self.data_source, "observe", None):  # a plug-in's data source may lack it
            observe(output.samples)
            metrics = {**metrics, **self.data_source.take_metrics()}
        return output.samples, metrics, self.facts

    @contextmanager
    def _naming_checkpoint(self) -> Iterator[None]:
        try:
            yield
        except DivergedError as error:
            raise error.with_checkpoint(self.config.checkpoint.save) from None

    def _rank_data(
        self, rollout_id: int, groups: list[SampleGroup], facts: Facts | None
    ) -> tuple[dict[int, list[RankData]], int]:
        """Returns the train data per rank, keyed by the number of data-parallel ranks, and the number of its rows.

        With --rlk-consistency, the policy's data contains each sample's facts.
        """
        samples = [sample for group in groups for sample in group]
        with self._refused_is_saved(rollout_id, groups, facts):
            data = checked_data(config := self._with_hooks(), self.hooks, samples, self.hf_config)
            found = {size: scheduled(config, data, size, self.hf_config) for size in self.dp_sizes}
        if self._audited:
            attach(found[self.dp_sizes[0]], samples, facts)
        return found, len(data["tokens"])

    @property
    def _audited(self) -> bool:
        return self.config.kernels.rlk_consistency != "off"

    @contextmanager
    def _refused_is_saved(
        self, rollout_id: int, groups: list[SampleGroup], facts: Facts | None
    ) -> Iterator[None]:
        """Saves a rollout that fails the check of its samples before the run ends, with --rlk-consistency."""
        try:
            yield
        except ValueError as error:
            if not self._audited:
                raise
            path = save_debug_rollout_data(replay_template(self.config), rollout_id, groups, facts=facts)
            raise ValueError(
                f"{error}; the batch is saved, see it again with --load-debug-rollout-data {path}"
            ) from error

    def _left_out(
        self, rollout_id: int, groups: list[SampleGroup], rows: int, ranks: list[RankData]
    ) -> dict[str, float]:
        """Counts samples at the end of a batch that do not fill an optimizer step and are not trained on."""
        trained = {row for rank in ranks for row in rank["partition"]}
        samples = [(get_number(group), sample) for group in groups for sample in group]
        if not (count := rows - len(trained)):
            return {}
        whole = list[int]()
        if rows == len(samples):  # a conversion hook may make other rows
            partly = {number for row, (number, _) in enumerate(samples) if row in trained}
            whole = sorted({number for number, _ in samples} - partly)
        self.state.events.add("left_out", rollout=rollout_id, samples=count, groups=whole)
        logger.warning(
            "rollout %d: %d of %d samples fill no optimizer step of --global-batch-size %d and are not trained on; "
            "return a multiple of it",
            *(rollout_id, count, rows, self.config.data.global_batch_size),
        )
        return {"rollout/samples_left_out": float(count)}

    def evaluate(self, rollout_id: int) -> Evaluated:
        """Returns the eval/* metrics of the current weights, and the data of held-out sets. The rollout function of a
        plug-in does not run at the same time."""
        phase = self.state.events.phase("eval", rollout=rollout_id)
        with self._naming_checkpoint(), self._turn, phase:
            output = call_rollout_fn(
                self.eval_function, self.args, rollout_id, self.data_source, evaluation=True
            )
        if self.config.debug.save_debug_rollout_data:
            groups = [result["samples"] for result in output.data.values()]
            save_debug_rollout_data(
                self.config.debug.save_debug_rollout_data, rollout_id, groups, evaluation=True
            )
        scored = {name: result for name, result in output.data.items() if "rewards" in result}
        held_out = {
            name: self._held_out(name, result.get("samples"))
            for name, result in output.data.items()
            if name not in scored
        }
        metrics = {**eval_metrics(self._with_hooks(), scored), **(output.metrics or {})}
        logged: list[Logged] = []
        if path := self.config.rollout.custom_eval_rollout_log_function_path:
            log = load_function(path, flag="--custom-eval-rollout-log-function-path")
            with outbox.collected() as logged:
                if log(rollout_id, self.args, output.data, metrics):
                    metrics = {}
        return Evaluated(metrics, [*outbox.take(), *logged], held_out)

    def _held_out(self, name: str, samples: list[Sample] | None) -> list[object]:
        """Returns the data of a held-out set, one piece per data-parallel rank."""
        if not samples:
            raise ValueError(
                f"--eval-function-path must return rewards or samples for dataset {name}, got neither; return the "
                "samples whose loss the trainer shall compute"
            )
        if loss_for((config := self._with_hooks()).algorithm).rewarded:
            raise ValueError(
                f"--eval-function-path must return rewards with --loss-type {config.algorithm.loss_type}, got samples "
                f"alone for dataset {name}; held-out losses are for sft_loss, dpo and reward_model"
            )
        data = checked_data(config, self.hooks, samples, self.hf_config)
        ranks = held_out_data(config, data, self.dp_sizes[0], self.hf_config)
        return [self.pack(of_rank) for of_rank in ranks]

    def keep_unfinished(self) -> None:
        """Takes a last snapshot, for a run that may resume."""
        if leave_queue(self.state):
            return
        if (snapshots := self.state.has_part(Snapshots)) is not None:
            snapshots.stop()
            self.state.run(snapshots.take())

    def close(self) -> None:
        if (snapshots := self.state.has_part(Snapshots)) is not None:
            snapshots.stop()
        if stream.outstanding(self.state):
            self.state.run(stream.stop(self.state))
        close_queue(self.state)
        self.state.close()
