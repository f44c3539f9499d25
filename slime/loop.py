"""The RL loop, on one screen.

    prompts -> generate -> rewards, filters -> train data -> train -> publish weights -> generate ...

    rollout i      rollout i+1     rollout i+2          max_staleness = 1: generation runs one rollout ahead
    |-- generate --|-- generate ---|-- generate --
                   |-- train i ----|-- train i+1 --     max_staleness = 0: generation waits for the new weights

Synchronous training is the asynchronous one with max_staleness 0. The loop knows no Ray, no Megatron and no vLLM: it is
handed three things that behave as slime.protocols says.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterator
from concurrent import futures
from concurrent.futures import Future
from typing import Any

from slime.protocols import EnginePool, RolloutHandle, TrainerHandle, WeightUpdate
from slime.tracking.report import Reporter
from slime.weight_sync.group import give_up


def run(
    config: Any, rollout: RolloutHandle, trainer: TrainerHandle, engines: EnginePool, report: Reporter
) -> None:
    """Train from the trainer's start rollout to `config.num_rollout`. Returns when done, raises on the first fault."""
    start, timers = trainer.start_rollout_id, report.timers
    publish(config, trainer, engines, version=start)
    if due(config.eval_interval, start) and not (start == 0 and config.skip_eval_before_train):
        report.evaluation(start, wait(rollout.evaluate(start), engines))
    ahead: deque[Future] = deque()
    # Between two updates the weights grow older by themselves: that much less may generation run ahead.
    lead = config.max_staleness + 1 - config.update_weights_interval
    for rollout_id in range(start, config.num_rollout):
        with timers.measure("step"):
            last = min(rollout_id + lead, config.num_rollout - 1)
            ahead.extend(rollout.generate(i) for i in range(rollout_id + len(ahead), last + 1))
            bar = report.bar(f"rollout {rollout_id}", "sample", rollout.progress)
            with timers.measure("train_wait"), bar as tick:
                batch = wait(ahead.popleft(), engines, tick)
            if config.colocate:
                with timers.measure("sleep"):
                    engines.sleep()
            bar = report.bar(f"train {rollout_id}", "micro-batch", trainer.progress)
            with timers.measure("train"), bar as tick:
                trained = wait(trainer.train(rollout_id, batch.rank_data), engines, tick)
            if config.colocate:
                with timers.measure("wake_up"):
                    engines.wake()
            if (rollout_id + 1) % config.update_weights_interval == 0:
                with timers.measure("update_weights"):
                    publish(config, trainer, engines, version=rollout_id + 1)
        report.step(rollout_id, batch, trained)
        if saves_after(config, rollout_id):
            # After the step's log line: a run killed in between repeats the step and its line, none is ever missing.
            # What is saved passes through the device, which engines that share it have filled by now.
            with timers.measure("save_model"):
                if config.colocate:
                    engines.sleep()
                wait(trainer.save(rollout_id), engines)
                if config.colocate and engines.wake():
                    publish(config, trainer, engines, version=rollout_id + 1)
            report.saved(rollout_id)
        if due(config.eval_interval, rollout_id + 1):
            report.evaluation(rollout_id + 1, wait(rollout.evaluate(rollout_id + 1), engines))


def generate_only(config: Any, rollout: RolloutHandle, engines: EnginePool, report: Reporter) -> None:
    """--debug-rollout-only: rollouts and their metrics, no training."""
    for rollout_id in range(config.start_rollout_id or 0, config.num_rollout):
        batch = wait(rollout.generate(rollout_id), engines)
        report.rollout(rollout_id, batch.metrics)


def publish(config: Any, trainer: TrainerHandle, engines: EnginePool, *, version: int) -> None:
    """Hand the trainer's weights to every engine. Version v holds the weights after v rollouts."""
    if config.debug_train_only:
        return
    engines.update_weights(functools.partial(weight_parts, trainer, engines, version))


def weight_parts(
    trainer: TrainerHandle, engines: EnginePool, version: int, receivers: dict[str, int]
) -> Iterator[WeightUpdate]:
    """The parts of the weights in order; the trainer makes the next one while engines load what was yielded."""
    coming = trainer.next_weights(version, receivers)
    while (part := wait(coming, engines)) is not None:
        coming = trainer.next_weights(version, receivers)
        if group := part.info.get("group"):
            coming.add_done_callback(functools.partial(give_up_on_failure, group=group))
        yield part


def give_up_on_failure(sent: Future, group: dict[str, Any]) -> None:
    """Engines wait for what the trainer sends: not for one that is gone."""
    if not sent.cancelled() and sent.exception() is not None:
        give_up(group)


def due(interval: int | None, count: int) -> bool:
    """Whether something that happens every `interval` rollouts (None: never) is due after `count` of them."""
    return interval is not None and count % interval == 0


def saves_after(config: Any, rollout_id: int) -> bool:
    """Whether a checkpoint follows rollout `rollout_id`: every --save-interval rollouts and after the last one."""
    if config.save is None:
        return False
    return due(config.save_interval, rollout_id + 1) or rollout_id + 1 == config.num_rollout


def wait(future: Future, engines: EnginePool, tick: Callable[[], None] | None = None) -> Any:
    """The future's result; meanwhile an engine that is lost for good ends the run instead of hanging it.

    `tick` is called every half second (it redraws a progress bar).
    """
    while not futures.wait([future], timeout=0.5).done:
        engines.check_health()
        if tick is not None:
            tick()
    return future.result()
