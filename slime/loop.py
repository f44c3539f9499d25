"""The RL loop, on one screen.

    prompts -> generate -> rewards, filters -> train data -> train -> publish weights -> generate ...

    |-- generate without end, at most max_staleness rollouts ahead ---     max_staleness = 0: generation waits for
              |-- train i ------|-- train i+1 ------                       the new weights

Synchronous training is the asynchronous case with max_staleness 0. The loop imports neither Ray nor Megatron nor an
engine. It gets a rollout manager, a trainer and an engine pool that implement slime.protocols.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from threading import Event
from typing import TypeVar

from slime.cluster.turns import DeviceSharing, share_devices
from slime.config import Config
from slime.protocols import EnginePool, RolloutBatch, RolloutHandle, TrainerHandle, TrainResult
from slime.recovery.recovery import Recovery
from slime.system.waiting import report_wait, wait
from slime.tracking.report import Reporter

T = TypeVar("T")


def run(
    config: Config,
    rollout: RolloutHandle,
    trainer: TrainerHandle,
    engines: EnginePool,
    report: Reporter,
    stop: Event | None = None,
) -> int:
    """Trains from the trainer's start rollout to `config.num_rollout`, and returns the first rollout that was not
    trained. Raises the first error of any part.

    If `stop` is set meanwhile, the run ends with a checkpoint of its last step. A training step goes on to its end. A
    rollout or an evaluation that has begun is given up.
    """
    loop = _Loop(config, rollout, trainer, engines, report, share_devices(config, engines), stop or Event())
    start = trainer.start_rollout_id
    loop.recovery = Recovery(config, trainer, loop, loop.turns, report.events, start)
    report.start(start)
    with report_wait("sending the first weights to the engines"), report.first_weights(start):
        loop.publish(start)
    loop.trained = loop.saved = start
    with loop.until_stopped():
        loop.evaluate_at_start(start)
        for rollout_id in range(start, config.rollouts):
            with report.running(rollout_id):
                loop.generate_ahead(rollout_id)
                batch = loop.batch(rollout_id)
                trained = loop.train(rollout_id, batch)
                loop.update_weights(rollout_id)
            report.step(rollout_id, batch, trained)
            loop.save(rollout_id)
            loop.evaluate(rollout_id + 1)
    loop.finish_save()
    return loop.trained


def generate_only(config: Config, rollout: RolloutHandle, engines: EnginePool, report: Reporter) -> None:
    """Runs --debug-rollout-only: rollouts, evaluations and their metrics, without training."""
    start = config.data.start_rollout_id or 0
    if evaluates_first(config, start):
        evaluate(rollout, None, engines.check_health, report, start)
    for rollout_id in range(start, config.rollouts):
        made = rollout.generate(rollout_id, saves_after(config, rollout_id), start)
        batch = wait(made, engines.check_health, report.heed)
        report.rollout(rollout_id, batch)
        if due(config.evaluation.eval_interval, rollout_id + 1):
            evaluate(rollout, None, engines.check_health, report, rollout_id + 1)


HeldOutLosses = Callable[[int, dict[str, list[object]]], dict[str, float]]
"""(number of trained rollouts, held-out sets) -> metrics of the sets."""


def evaluate(
    rollout: RolloutHandle,
    losses: HeldOutLosses | None,
    check: Callable[[], None],
    report: Reporter,
    count: int,
) -> None:
    """Evaluates the weights after `count` rollouts. `losses` computes the trainer's losses, and is None without a
    trainer. `slime.system.waiting.wait` calls `check`."""
    with report.events.phase("eval", rollout=count):
        evaluated = wait(rollout.evaluate(count), check)
        if evaluated.held_out and losses is not None:
            of_trainer = losses(count, evaluated.held_out)
            evaluated = replace(evaluated, metrics=evaluated.metrics | of_trainer)
    report.evaluation(count, evaluated)


def due(interval: int | None, count: int) -> bool:
    """Returns True if an action with this interval in rollouts (None: never) is due after `count` rollouts."""
    return interval is not None and count % interval == 0


def saves_after(config: Config, rollout_id: int) -> bool:
    """Returns True if a checkpoint follows the rollout: every --save-interval rollouts and after the last rollout."""
    if config.checkpoint.save is None:
        return False
    return due(config.checkpoint.save_interval, rollout_id + 1) or rollout_id + 1 == config.data.num_rollout


def evaluates_first(config: Config, start: int) -> bool:
    """Returns True if an evaluation precedes rollout `start`. A run with --num-rollout 0 only makes this evaluation.
    --skip-eval-before-train leaves out the evaluation of the untrained model."""
    if config.data.num_rollout == 0:
        return config.evaluation.eval_interval is not None
    wanted = start > 0 or not config.evaluation.skip_eval_before_train
    return wanted and due(config.evaluation.eval_interval, start)


class _Stopped(Exception):
    """The run was asked to end during work that it can leave out."""


@dataclass
class _Loop:
    """The steps of `run`."""

    config: Config
    rollout: RolloutHandle
    trainer: TrainerHandle
    engines: EnginePool
    report: Reporter
    turns: DeviceSharing
    stop: Event
    recovery: Recovery = field(init=False)
    """It runs every call of the trainer, because the trainer may have to start again."""
    ahead: deque[Future[RolloutBatch]] = field(default_factory=deque)
    """Rollouts that are being generated, in order."""
    trained: int = 0
    """The first rollout that was not trained."""
    saved: int = 0
    """The first rollout that is not in the newest checkpoint."""
    published: int = 0
    """The version of the engines' weights."""

    @contextmanager
    def until_stopped(self) -> Iterator[None]:
        """Lets the block end early, and then saves the last trained step."""
        try:
            yield
        except _Stopped:
            self.report.timers.flush()  # The flushed times belong to an unfinished step.
            if self.saved < self.trained:
                self._save(self.trained - 1)

    def generate_ahead(self, rollout_id: int) -> None:
        """Starts the rollouts that may use the present weights, up to max_staleness rollouts ahead."""
        last = min(rollout_id + self.config.rollouts_ahead, self.config.rollouts - 1)
        for i in range(rollout_id + len(self.ahead), last + 1):
            saves = saves_after(self.config, i) or self.config.checkpoint.exit_signal_handler
            self.ahead.append(self.rollout.generate(i, saves, self.published))

    def batch(self, rollout_id: int) -> RolloutBatch:
        """Returns the data of rollout `rollout_id`."""
        bar = self.report.bar(f"rollout {rollout_id}", "sample", self.rollout.progress)
        with self.report.timers.measure("train_wait"), bar as tick:
            return wait(self.ahead.popleft(), self._check, tick)

    def train(self, rollout_id: int, batch: RolloutBatch) -> TrainResult:
        """Trains on the batch. Colocated engines sleep meanwhile."""
        timers = self.report.timers

        def train() -> TrainResult:
            self.turns.begin(timers)
            bar = self.report.bar(f"train {rollout_id}", "micro-batch", self.trainer.progress)
            with timers.measure("train"), bar as tick:
                return self._wait(self.trainer.train(rollout_id, batch.rank_data), tick)

        trained = self.recovery.run(f"training rollout {rollout_id}", train)
        self.recovery.add(rollout_id, batch)
        self.recovery.save_in_memory(rollout_id, timers)
        self.turns.end(timers)
        return trained

    def update_weights(self, rollout_id: int) -> None:
        """Publishes the weights every --update-weights-interval rollouts."""
        if due(self.config.weight_update.update_weights_interval, rollout_id + 1):
            with self.report.timers.measure("update_weights"), report_wait("sending weights to the engines"):
                self.publish(rollout_id + 1)

    def publish(self, version: int) -> None:
        self.recovery.run(f"publishing weights {version}", lambda: self.publish_now(version))

    def publish_now(self, version: int) -> None:
        """Publishes the weights without a restart of the trainer."""
        self.report.sent(self.engines.publish(version))
        self.published = version

    def check_engines(self) -> None:
        self.engines.check_health()

    def save(self, rollout_id: int) -> None:
        """Saves a checkpoint if one is due, or if the run was asked to end.

        The checkpoint follows the step's log line. A run that is killed between the two repeats the step and its line,
        so no line is missing.
        """
        self.trained = rollout_id + 1
        if saves_after(self.config, rollout_id) or self.stop.is_set():
            self._save(rollout_id)

    def _save(self, rollout_id: int) -> None:
        """Saves a checkpoint. Colocated engines sleep meanwhile, because saving needs device memory."""
        with (
            self.report.timers.measure("save_model"),
            report_wait(f"saving the checkpoint of rollout {rollout_id}"),
        ):
            self.recovery.run(f"saving rollout {rollout_id}", lambda: self._save_now(rollout_id))
            if self.turns.end():
                self.publish(rollout_id + 1)
        self.saved = rollout_id + 1
        self.report.saved(rollout_id)

    def _save_now(self, rollout_id: int) -> None:
        self.turns.begin()
        self._wait(self.trainer.save(rollout_id))
        self.recovery.saved(rollout_id)

    def finish_save(self) -> None:
        """Waits until the files of the last checkpoint are written."""
        if self.config.checkpoint.async_save:
            with report_wait("writing the last checkpoint"):
                self.recovery.run("writing files", lambda: self._wait(self.trainer.finish_save()))

    def evaluate_at_start(self, start: int) -> None:
        """Evaluates before the first rollout."""
        self._heed_stop()
        if evaluates_first(self.config, start):
            evaluate(self.rollout, self._held_out, self._check, self.report, start)

    def evaluate(self, count: int) -> None:
        """Evaluates the weights after `count` rollouts, every --eval-interval rollouts. Engines that still have older
        weights (--update-weights-interval) get these weights first."""
        self._heed_stop()
        if not due(self.config.evaluation.eval_interval, count):
            return
        if self.published < count:
            with (
                report_wait("sending weights to the engines"),
                self.report.events.phase("update", rollout=count),
            ):
                self.publish(count)
        evaluate(self.rollout, self._held_out, self._check, self.report, count)

    def _held_out(self, count: int, sets: dict[str, list[object]]) -> dict[str, float]:
        """Returns the losses of held-out sets. Colocated engines sleep meanwhile, because the trainer needs device
        memory."""

        def evaluate() -> dict[str, float]:
            self.turns.begin()
            return self._wait(self.trainer.evaluate(count, sets))

        with report_wait("computing the loss of held-out samples"):
            metrics = self.recovery.run(f"evaluating {count}", evaluate)
            if self.turns.end():
                self.publish(count)
        return metrics

    def _heed_stop(self) -> None:
        """Raises `_Stopped` if the run was asked to end."""
        if self.stop.is_set():
            raise _Stopped

    def _check(self) -> None:
        """Raises an error of the engines or the trainer, or `_Stopped`, during work that the run can leave out."""
        self._heed_stop()
        self.report.heed()
        self.engines.check_health()
        self.recovery.check()

    def _wait(self, future: Future[T], tick: Callable[[], None] | None = None) -> T:
        return wait(future, self.engines.check_health, tick)
