"""Defines the Ray actor of the rollout manager, and the handle with which the loop calls it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import ray
from ray.exceptions import RayError

from slime.cluster.actors import PROGRESS, freeze_objects, log_to
from slime.cluster.calls import Ref, ask_progress, first_failure_or_all
from slime.cluster.trainers import Trainers
from slime.config import Config
from slime.protocols import Evaluated, RolloutBatch, RolloutEngine
from slime.system.import_path import SAFE_PATH
from slime.system.imports import uncollected
from slime.tracking.run_record import record_warnings

LAST_SNAPSHOT_S = 5.0
"""Maximum seconds for the last snapshot of the unfinished groups when a run ends."""


class RolloutActor:
    """Runs the rollout manager in a separate process. Torch and the manager's other imports are loaded here, never in
    the driver. Each rank's data is kept in Ray's object store."""

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
            self.config, engine, dp_size, facts, lambda data: ray.put(with_source(pack_columns(data)))
        )
        warnings.begin(self.manager.state.events)
        freeze_objects()

    def load(self, start_rollout_id: int) -> None:
        self.manager.load(start_rollout_id)

    def generate(self, rollout_id: int, saves: bool) -> RolloutBatch:
        # after Ctrl-C, each rollout may be the last one, which is saved
        return self.manager.generate(rollout_id, saves, may_be_last=self.config.checkpoint.save is not None)

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
        return self.manager.evaluate(rollout_id)


class RolloutGroup:
    """Controls the rollout manager's actor. Implements slime.protocols.RolloutHandle."""

    def __init__(
        self,
        config: Config,
        engine: RolloutEngine | None,
        dp_size: int,
        facts: Mapping[str, object],
    ) -> None:
        self._config = config
        self._threads = [
            ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"rollout-{i}") for i in range(2)
        ]
        remote = ray.remote(concurrency_groups=PROGRESS | {"evaluation": 1})  # type: ignore[call-overload]
        actor = remote(RolloutActor).options(num_cpus=0)
        self._actor = actor.remote(config)
        self.building = {self._actor.build.remote(engine, dp_size, facts): "rollout"}

    def load(self, start_rollout_id: int) -> None:
        """Sets the data source to its position before rollout `start_rollout_id`."""
        self._result(self._actor.load.remote(start_rollout_id))

    def progress(self) -> tuple[int, int]:
        return ask_progress(self._actor)

    def generate(self, rollout_id: int, saves: bool, version: int) -> Future[RolloutBatch]:
        self._actor.allow.remote(rollout_id, version)
        return self._threads[0].submit(self._result, self._actor.generate.remote(rollout_id, saves))

    def evaluate(self, rollout_id: int) -> Future[Evaluated]:
        return self._threads[1].submit(self._result, self._actor.evaluate.remote(rollout_id))

    def set_engines(self, count: int) -> None:
        """Sets the number of the policy's engines that serve from now on."""
        self._actor.set_engines.remote(count)

    def _result(self, ref: Ref) -> Any:
        return first_failure_or_all(self._config, {ref: "rollout"})[0]

    def stop(self) -> None:
        for threads in self._threads:
            threads.shutdown(wait=False, cancel_futures=True)
        try:
            with contextlib.suppress(RayError):  # the actor may be dead, hang, or have no manager yet
                ray.get(self._actor.keep_unfinished.remote(), timeout=LAST_SNAPSHOT_S)
        finally:  # a second Ctrl-C may end the wait
            ray.kill(self._actor)


def wait_built(
    config: Config,
    trainer: Trainers | None,
    rollout: RolloutGroup,
    check: Callable[[], None] | None = None,
) -> None:
    """Returns when every rank has its model and the rollout manager has its data. The first failure ends the wait.
    `check`: see `first_failure_or_all`."""
    ranks = {} if trainer is None else trainer.building
    answers = first_failure_or_all(config, {**ranks, **rollout.building}, check=check)
    if trainer is not None:
        trainer.take_built(answers[: len(ranks)])
