"""Defines the Ray actor of the rollout manager, and the handle with which the loop calls it.

The driver owns the train data of the rollouts, so they outlive the actor. If the process of the actor dies, the handle
starts another one, which continues at the data position after the last finished rollout, and makes the rollouts that
the loop waits for again.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import ray
from ray.exceptions import RayError

from slime.cluster.actors import PROGRESS, freeze_objects, log_to
from slime.cluster.calls import Actor, ActorError, Ref, ask_progress, first_failure_or_all
from slime.cluster.trainers import Trainers
from slime.config import Config
from slime.protocols import Evaluated, RolloutBatch, RolloutEngine
from slime.roles.groups import build_groups
from slime.system.import_path import SAFE_PATH
from slime.system.imports import uncollected
from slime.tracking.events import Events
from slime.tracking.run_record import record_warnings

LAST_SNAPSHOT_S = 5.0
"""Maximum seconds for the last snapshot of the unfinished groups when a run ends."""
_NAME = "rollout"


class RolloutActor:
    """Runs the rollout manager in a separate process. Torch and the manager's other imports are loaded here, never in
    the driver."""

    def __init__(self, config: Config) -> None:
        log_to(config, "rollout")
        for name in SAFE_PATH:  # a reward may start a program that imports files from its own folder
            os.environ.pop(name, None)
        self.config = config

    def build(self, engine: RolloutEngine | None, dp_size: int, facts: Mapping[str, object]) -> None:
        """Builds the manager. If the constructor built it and raised, Ray would only report that the process died."""
        with uncollected(freeze=True):
            from slime.cluster.images import with_source
            from slime.data.transport import pack_columns
            from slime.rollout.manager import RolloutManager

        warnings = record_warnings()  # also warnings of the prompt files
        self.manager = RolloutManager(
            self.config, engine, dp_size, facts, lambda data: with_source(pack_columns(data))
        )
        warnings.begin(self.manager.state.events)
        freeze_objects()

    def load(self, start_rollout_id: int) -> None:
        self.manager.load(start_rollout_id)

    def generate(self, rollout_id: int, saves: bool) -> list[object]:
        """Returns the batch, and the data of the ranks, each piece once. `rank_data` of the batch has the numbers of
        these pieces. The caller owns the returned objects, so the data outlives this process."""
        # after Ctrl-C, each rollout may be the last one, which is saved
        batch = self.manager.generate(rollout_id, saves, may_be_last=self.config.checkpoint.save is not None)
        pieces = {id(data): data for data in batch.rank_data}
        numbers = {key: number for number, key in enumerate(pieces)}
        return [replace(batch, rank_data=[numbers[id(data)] for data in batch.rank_data]), *pieces.values()]

    def serve_queue(self, host: str, ended: int) -> dict[str, int]:
        """Calls `RolloutManager.serve_queue`."""
        return self.manager.serve_queue(host, ended)

    @ray.method(concurrency_group="progress")
    def progress(self) -> tuple[int, int]:
        return self.manager.state.progress

    @ray.method(concurrency_group="progress")
    def read_images(self, paths: list[str]) -> list[bytes]:
        """Returns the content of processed images, for a trainer rank on a host that lacks their files."""
        from slime.cluster.images import read_files

        return read_files(paths)

    @ray.method(concurrency_group="progress")
    def allow(self, rollout_id: int, version: int) -> None:
        """Calls `GenerateState.allow`."""
        self.manager.state.allow(rollout_id, version)

    @ray.method(concurrency_group="progress")
    def set_engines(self, count: int) -> None:
        """Calls `GenerateState.set_engines`."""
        self.manager.state.set_engines(count)

    @ray.method(concurrency_group="progress")
    def keep_unfinished(self) -> None:
        """Calls `RolloutManager.keep_unfinished`."""
        self.manager.keep_unfinished()

    @ray.method(concurrency_group="evaluation")
    def evaluate(self, rollout_id: int) -> Evaluated:
        """Runs an evaluation. A rollout may run at the same time."""
        made = self.manager.evaluate(rollout_id)
        stored: dict[str, list[object]] = {
            name: [ray.put(data) for data in ranks] for name, ranks in made.held_out.items()
        }
        return replace(made, held_out=stored)


@dataclass
class _Pending:
    """A rollout that the loop waits for. `refs` are the results of the actor's call."""

    saves: bool
    version: int
    refs: list[Ref] = field(default_factory=list)


class RolloutGroup:
    """Controls the rollout manager's actor. Implements slime.protocols.RolloutHandle."""

    def __init__(
        self,
        config: Config,
        engine: RolloutEngine | None,
        dp_size: int,
        facts: Mapping[str, object],
    ) -> None:
        self._config, self._arguments = config, (engine, dp_size, facts)
        self._threads = [
            ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"rollout-{i}") for i in range(2)
        ]
        # The ranks of groups with the same number of data-parallel ranks share their data.
        sizes = {dp_size, *(group.config.data_parallel_size for group in build_groups(config)[1:])}
        self._returned = 1 + sum(sizes)
        self._pending: dict[int, _Pending] = {}
        self._lock, self._ended = threading.RLock(), threading.Event()
        self._start = self._next = self._restarts = 0
        self._engines: int | None = None
        self._events = Events("driver", config.logging.run_dir)
        self._begin(config)

    def _begin(self, config: Config) -> None:
        """Starts an actor, which builds its manager."""
        remote = ray.remote(concurrency_groups=PROGRESS | {"evaluation": 1})  # type: ignore[call-overload]
        self._actor: Actor = remote(RolloutActor).options(name=_NAME, num_cpus=0).remote(config)
        self.building = {self._actor.build.remote(*self._arguments): _NAME}

    def load(self, start_rollout_id: int) -> None:
        """Sets the data source to its position before rollout `start_rollout_id`, the first rollout of the run."""
        self._start = self._next = start_rollout_id
        self._result(self._actor.load.remote(start_rollout_id))

    def progress(self) -> tuple[int, int]:
        return ask_progress(self._actor)

    def generate(self, rollout_id: int, saves: bool, version: int) -> Future[RolloutBatch]:
        with self._lock:
            self._pending[rollout_id] = _Pending(saves, version)
            self._send(rollout_id)
        return self._threads[0].submit(self._receive, rollout_id)

    def _send(self, rollout_id: int) -> None:
        one = self._pending[rollout_id]
        self._actor.allow.remote(rollout_id, one.version)
        call = self._actor.generate.options(num_returns=self._returned)
        one.refs = call.remote(rollout_id, one.saves)

    def _receive(self, rollout_id: int) -> RolloutBatch:
        """Returns a rollout. If the actor dies meanwhile, another actor makes the rollout."""
        while True:
            with self._lock:
                actor, refs = self._actor, self._pending[rollout_id].refs
            try:
                batch: RolloutBatch = self._result(refs[0])
            except ActorError as error:
                self._bring_back(actor, error)
                continue
            with self._lock:
                del self._pending[rollout_id]
                self._next, self._restarts = rollout_id + 1, 0
            return replace(batch, rank_data=[refs[1 + number] for number in batch.rank_data])  # type: ignore[operator]

    def serve_queue(self, host: str, ended: int) -> Future[dict[str, int]]:
        """Generates for another trainer. Returns the numbers of groups whose answers were taken and discarded."""
        return self._threads[0].submit(self._result, self._actor.serve_queue.remote(host, ended))

    def allow(self, version: int) -> None:
        """Lets groups that were drawn at `version` start, because the engines have these weights."""
        self._actor.allow.remote(version, version)

    def evaluate(self, rollout_id: int) -> Future[Evaluated]:
        return self._threads[1].submit(self._evaluate, rollout_id)

    def _evaluate(self, rollout_id: int) -> Evaluated:
        while True:
            with self._lock:
                actor = self._actor
            try:
                evaluated: Evaluated = self._result(actor.evaluate.remote(rollout_id))
                return evaluated
            except ActorError as error:
                self._bring_back(actor, error)

    def _bring_back(self, lost: Actor, error: ActorError) -> None:
        """Replaces the actor `lost` by a new one, unless another thread has replaced it. Raises `error` if no new actor
        may start: the process did not die, there are no saved data positions, or it has died too often without a new
        rollout."""
        with self._lock:
            while self._actor is lost:
                if not self._may_restart(error):
                    raise error
                self._restarts += 1
                began = time.monotonic()
                self._events.add("manager_lost", rollout=self._next, text=str(error))
                print(f"note: {error}; the rollout manager starts again", file=sys.stderr, flush=True)
                try:
                    self._restart()
                except ActorError as again:
                    lost, error = self._actor, again
                    continue
                seconds = time.monotonic() - began
                print(f"note: the rollout manager is back after {seconds:.1f} s", file=sys.stderr, flush=True)

    def _may_restart(self, error: ActorError) -> bool:
        most = self._config.fault_tolerance.max_manager_restarts
        is_saved = self._config.checkpoint.save is not None
        return error.died and is_saved and self._restarts < most and not self._ended.is_set()

    def _restart(self) -> None:
        """Starts a new actor at the position after the last finished rollout, and calls it again for the others."""
        began, first, config = time.monotonic(), self._next, self._config
        if first > self._start:
            config = config.with_values(load=config.checkpoint.save)
        ray.kill(self._actor)  # frees the actor's name
        self._begin(config)
        if self._ended.is_set():
            ray.kill(self._actor)
        for ref in (*self.building, self._actor.load.remote(first)):
            self._result(ref)
        if self._engines is not None:
            self._actor.set_engines.remote(self._engines)
        seconds = round(time.monotonic() - began, 3)
        self._events.add("manager_restarted", rollout=first, seconds=seconds)
        for rollout_id in self._pending:
            self._send(rollout_id)

    def set_engines(self, count: int) -> None:
        """Sets the number of the policy's engines that serve from now on."""
        with self._lock:
            self._engines = count
            self._actor.set_engines.remote(count)

    def _result(self, ref: Ref) -> Any:
        return first_failure_or_all(self._config, {ref: _NAME})[0]

    def stop(self) -> None:
        self._ended.set()
        for threads in self._threads:
            threads.shutdown(wait=False, cancel_futures=True)
        try:
            with contextlib.suppress(RayError):  # the actor may be dead, hang, or have no manager yet
                ray.get(self._actor.keep_unfinished.remote(), timeout=LAST_SNAPSHOT_S)
        finally:  # a second Ctrl-C may end the wait
            ray.kill(self._actor)
            self._events.close()


def wait_built(
    config: Config,
    trainer: Trainers | None,
    rollout: RolloutGroup,
    check: Callable[[], None] | None = None,
) -> None:
    """Returns when every rank has its model and the rollout manager has its data. The first failure ends the wait. For
    `check`, see `first_failure_or_all`."""
    ranks = {} if trainer is None else trainer.building
    answers = first_failure_or_all(config, {**ranks, **rollout.building}, check=check)
    if trainer is not None:
        trainer.take_built(answers[: len(ranks)])
