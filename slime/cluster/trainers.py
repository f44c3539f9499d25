"""Controls the trainer ranks of a run for the loop and the engine pool: one or several groups (`slime.roles.groups`).

one group train(rollout) several groups score(rollout) on each -> columns from one group to the other -> train on each,
at the same time
"""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

import ray

from slime.checkpoints.memory_files import StoredState
from slime.cluster.actors import LIFE, PROGRESS, TrainerActor
from slime.cluster.calls import Actor, ActorError, Ref, ask_progress, first_failure_or_all, log_path
from slime.cluster.faults.lost import AnswerWatch, RankLost, find_dead, is_loss
from slime.cluster.faults.memory_nodes import MemoryNodes
from slime.cluster.faults.renewal import renew
from slime.cluster.numa import format_cpus
from slime.cluster.placement import Placement, cpu_threads
from slime.cluster.rendezvous import LOOPBACK_ONLY
from slime.config import Config
from slime.protocols import RecoveryPoint, TrainResult, WeightUpdate
from slime.roles.groups import RoleGroup, build_groups, on_one_host

T = TypeVar("T")
_WHOLE_S = 0.2
"""Seconds between two looks whether restarted ranks have the newest weights."""


class TrainerGroup:
    """The ranks of a group: processes that call each other's collectives. A call runs on every rank."""

    def __init__(
        self, config: Config, group: RoleGroup, placement: Placement, bundles: Sequence[int]
    ) -> None:
        self.group, self._config = group, config
        threads = cpu_threads(config)[0] if placement.resource == "CPU" else 0
        shared = LOOPBACK_ONLY if on_one_host(config) else {}
        self._calling = threading.Lock()
        self._names = [f"{group.name}-{rank}" for rank in range(len(bundles))]
        self.actors: list[Actor] = [
            ray.remote(concurrency_groups=PROGRESS | LIFE)(TrainerActor)  # type: ignore[call-overload]
            .options(name=name, **placement.options(bundle))
            .remote(
                *(group.config, group.name, rank, threads),
                {**shared, **placement.visible([bundle])},
                placement.buses([bundle]),
            )
            for rank, (name, bundle) in enumerate(zip(self._names, bundles, strict=True))
        ]
        self.liveness = self.call(lambda actor, rank: actor.live.remote())
        # Ranks on one host meet through a private file, because torch's network store checks no key.
        self._private = None
        if on_one_host(config):
            self._private = tempfile.TemporaryDirectory(prefix="vime-rendezvous-", ignore_cleanup_errors=True)
            init_method = f"file://{self._private.name}/store"
        else:
            (init_method,) = first_failure_or_all(config, {self.actors[0].open_port.remote(): self._names[0]})
        self.building = self.call(lambda actor, rank: actor.build.remote(init_method))

    def take_built(self, built: Sequence[Any]) -> None:
        """Stores the answers of `building`; see `rollout_actor.wait_built`."""
        self._dp_ranks = [dp_rank for dp_rank, *_ in built]
        _, self.start_rollout_id, self.decisions, memory, _ = built[0]
        whose = "" if self.group.name == "trainer" else f"{self.group.name}: "
        self.memory = [f"{whose}{line}" for line in memory]
        ranks: dict[str, list[int]] = {}
        for rank, (*_, remarks) in enumerate(built):
            for remark in remarks:
                ranks.setdefault(remark, []).append(rank)
        self.remarks = [
            f"{remark}: {self.group.name} ranks {format_cpus(its)}" for remark, its in ranks.items()
        ]

    def call(self, call: Callable[[Actor, int], Ref]) -> dict[Ref, str]:
        """Calls every rank. A call is a collective, so the calls of several threads must reach all ranks in the same
        order."""
        with self._calling:
            return {call(actor, rank): self._names[rank] for rank, actor in enumerate(self.actors)}

    def named_actors(self) -> list[tuple[str, Actor]]:
        """Returns the name and the actor of each rank."""
        return list(zip(self._names, self.actors, strict=True))

    def score(self, rollout_id: int, rank_data: Sequence[object]) -> dict[Ref, str]:
        """Calls the passes before training; see `TrainerActor.score`. `rank_data` has one entry per data-parallel rank.

        Sets `columns` to one answer per data-parallel rank, because the other ranks of the model have the same answer.
        """
        data, found = self._select_ranks(rank_data), list[Ref]()

        def score(actor: Actor, rank: int) -> Ref:
            both: list[Ref] = actor.score.remote(rollout_id, data[rank])
            found.append(both[1])
            return both[0]

        calls = self.call(score)
        dp_size = self.group.config.data_parallel_size
        self.columns = [found[self._dp_ranks.index(dp_rank)] for dp_rank in range(dp_size)]
        return calls

    def train(
        self, rollout_id: int, rank_data: Sequence[object], received: Sequence[Ref] | None = None
    ) -> dict[Ref, str]:
        """Trains a rollout. With `received`, runs the second half of training, after `score`."""
        data = self._select_ranks(rank_data) if received is None else [None] * len(self.actors)
        more = received or ()
        return self.call(lambda actor, rank: actor.train.remote(rollout_id, data[rank], *more))

    def evaluate(self, rollout_id: int, held_out: Mapping[str, Sequence[object]]) -> dict[Ref, str]:
        """Computes the loss of held-out sets; see `TrainerActor.evaluate`. A set has one entry per data-parallel
        rank."""
        names, of_ranks = list(held_out), [self._select_ranks(data) for data in held_out.values()]

        def evaluate(actor: Actor, rank: int) -> Ref:
            return actor.evaluate.remote(rollout_id, names, *(data[rank] for data in of_ranks))

        return self.call(evaluate)

    def _select_ranks(self, rank_data: Sequence[object]) -> list[object]:
        return [rank_data[dp_rank] for dp_rank in self._dp_ranks]

    def stop(self) -> None:
        for actor in self.actors:
            ray.kill(actor)
        if self._private is not None:
            self._private.cleanup()


class Trainers:
    """Controls all trainer ranks. Implements slime.protocols.TrainerHandle and WeightSource. A future holds the answer
    of rank 0 of the policy's group."""

    def __init__(self, config: Config, placement: Placement) -> None:
        self._config, self._placement = config, placement
        self._threads = ThreadPoolExecutor(max_workers=3, thread_name_prefix="trainers")
        self._files = ThreadPoolExecutor(max_workers=4, thread_name_prefix="weights-file")
        self._ended = threading.Event()
        folder = config.checkpoint.memory_dir
        self._memory_nodes = None if folder is None else MemoryNodes(folder)
        self._start(config)
        self._whole.set()

    def _start(self, config: Config) -> None:
        """Starts the ranks. `_whole` is set when their weights are those of the newest trained rollout."""
        self._whole = threading.Event()
        if self._memory_nodes is not None:
            ranks = (bundle for bundles in self._placement.trainer_bundles for bundle in bundles)
            self._memory_nodes.add({self._placement.nodes[bundle].name for bundle in ranks})
        self._groups = [
            TrainerGroup(config, group, self._placement, bundles)
            for group, bundles in zip(build_groups(config), self._placement.trainer_bundles, strict=True)
        ]
        self.policy = self._groups[0]
        self.liveness = {ref: name for group in self._groups for ref, name in group.liveness.items()}
        self.building = {ref: name for group in self._groups for ref, name in group.building.items()}
        named = {name: actor for group in self._groups for name, actor in group.named_actors()}
        self._answers = AnswerWatch(named, 60.0 * config.cluster.distributed_timeout_minutes)

    def find_states(self, role: str) -> Collection[StoredState]:
        return () if self._memory_nodes is None else self._memory_nodes.find_states(role)

    def end_ranks(self) -> None:
        self._whole.clear()
        # Ray's kill is second: it would wait for a process that a signal has stopped.
        self._answers.end(self._config.fault_tolerance.rollout_cleanup_timeout)
        for group in self._groups:
            group.stop()

    @contextmanager
    def restarted(self, point: RecoveryPoint | None, check: Callable[[], None]) -> Iterator[int]:
        self._placement = renew(self._placement)
        config = self._config
        if point is not None:
            config = config.with_values(restart_dir=point.directory, restart_iteration=point.iteration)
        self._start(config)

        def check_all() -> None:
            check()
            self.check()

        self.take_built(self._losses(lambda: first_failure_or_all(config, self.building, check=check_all)))
        yield self.start_rollout_id
        self._whole.set()

    def check(self) -> None:
        log = log_path(self._config, "trainer").parent
        if (dead := find_dead(self.liveness, log)) is not None:
            raise dead
        if (silent := self._answers.find_silent()) is not None:
            raise RankLost(
                silent, "its process does not answer (--distributed-timeout-minutes)", log / f"{silent}.log"
            )

    def take_built(self, built: Sequence[Any]) -> None:
        """Stores the answers of `building`; see `rollout_actor.wait_built`."""
        for group in self._groups:
            group.take_built(built[: len(group.actors)])
            built = built[len(group.actors) :]
        self.start_rollout_id, self.decisions = self.policy.start_rollout_id, self.policy.decisions
        self.memory = [line for group in self._groups for line in group.memory]
        self.remarks = [line for group in self._groups for line in group.remarks]

    def train(self, rollout_id: int, rank_data: list[object]) -> Future[TrainResult]:
        if len(self._groups) > 1:
            return self._threads.submit(self._train_groups, rollout_id, rank_data)
        calls = self.policy.train(rollout_id, rank_data)
        return self._threads.submit(lambda: merge_results(self._results(calls)))

    def _train_groups(self, rollout_id: int, rank_data: Sequence[object]) -> TrainResult:
        scored: dict[TrainerGroup, dict[Ref, str]] = {}
        for group in self._groups:
            size = group.group.config.data_parallel_size
            scored[group] = group.score(rollout_id, rank_data[:size])
            rank_data = rank_data[size:]
        calls = {ref: name for refs in scored.values() for ref, name in refs.items()}
        results: dict[TrainerGroup, list[Ref]] = {}
        # A group that awaits no other group trains at once.
        for group in sorted(self._groups, key=lambda group: len(self._awaited(group))):
            awaited = self._awaited(group)
            # A rank runs its calls in order: `progress` would wait behind a call that waits for its arguments.
            self._results({ref: name for other in awaited for ref, name in scored[other].items()})
            received = [ref for other in awaited for ref in other.columns]
            trained = group.train(rollout_id, (), received)
            results[group], calls = list(trained), calls | trained
        answers = dict(zip(calls, self._results(calls), strict=True))
        return merged(
            {group.group: merge_results([answers[ref] for ref in results[group]]) for group in self._groups}
        )

    def _awaited(self, group: TrainerGroup) -> list[TrainerGroup]:
        return [other for other in self._groups if group.group.awaits(other.group)]

    def evaluate(self, rollout_id: int, held_out: Mapping[str, list[object]]) -> Future[dict[str, float]]:
        return self._answer(self.policy.evaluate(rollout_id, held_out))

    def progress(self) -> tuple[int, int]:
        parts = [ask_progress(group.actors[0]) for group in self._groups]
        return sum(done for done, _ in parts), sum(total for _, total in parts)

    def save(self, rollout_id: int) -> Future[None]:
        """Saves the checkpoints, the policy's last, so that it never exists without the others.

        With --async-save, the files of the groups become complete in any order.
        """

        def in_order() -> None:
            for group in reversed(self._groups):
                self._results(group.call(lambda actor, rank: actor.save.remote(rollout_id)))

        return self._threads.submit(in_order)

    def save_in_memory(self, rollout_id: int) -> Future[None]:
        return self._all(lambda actor, rank: actor.save_in_memory.remote(rollout_id))

    def finish_save(self) -> Future[None]:
        return self._all(lambda actor, rank: actor.finish_save.remote())

    def _all(self, call: Callable[[Actor, int], Ref]) -> Future[None]:
        """Calls the ranks of all groups at the same time."""
        calls = [group.call(call) for group in self._groups]
        return self._answer({ref: name for of_group in calls for ref, name in of_group.items()})

    def next_weights(self, version: int, receivers: dict[str, int]) -> Future[WeightUpdate | None]:
        return self._answer(self.policy.call(lambda actor, _: actor.next_weights.remote(version, receivers)))

    def weights_file(self) -> Future[WeightUpdate]:
        """Returns the weights after the calls that the ranks run now. Any thread may call this method. While the ranks
        start again, the answer waits until they have repeated all rollouts."""
        return self._files.submit(self._write_file)

    def _write_file(self) -> WeightUpdate:
        lost: threading.Event | None = None
        while not self._ended.is_set():
            whole = self._whole
            if whole is lost or not whole.is_set():
                self._ended.wait(_WHOLE_S)
                continue
            try:
                update: WeightUpdate = self._results(
                    self.policy.call(lambda actor, rank: actor.weights_file.remote())
                )[0]
                return update
            except RankLost:
                lost = whole
        raise RuntimeError(
            "the trainer must run to write a file of its weights, got its end; look for the error that has ended the "
            "run"
        )

    def _answer(self, calls: dict[Ref, str]) -> Future[Any]:
        return self._threads.submit(lambda: self._results(calls)[0])

    def _results(self, calls: dict[Ref, str]) -> list[Any]:
        liveness = self.liveness if len(self._groups) > 1 else {}
        return self._losses(lambda: first_failure_or_all(self._config, calls, liveness, check=self.check))

    def _losses(self, call: Callable[[], T]) -> T:
        """Calls `call`. Raises RankLost instead of an error from which new ranks may recover."""
        try:
            return call()
        except ActorError as error:
            if isinstance(error, RankLost) or not is_loss(error):
                raise
            raise RankLost.from_error(error) from None

    def stop(self) -> None:
        self._ended.set()
        for threads in (self._threads, self._files):
            threads.shutdown(wait=False, cancel_futures=True)
        for group in self._groups:
            group.stop()
        if self._memory_nodes is not None:
            self._memory_nodes.close()


def merge_results(results: Sequence[TrainResult]) -> TrainResult:
    """Returns the result of the first rank, with the metrics that functions of the user logged on all ranks.

    The function decides which rank logs. If several ranks logged metrics with the same names and step, the first rank's
    are used.
    """
    logged = list(results[0].logged)
    for result in results[1:]:
        known = {(one.step_key, one.step, *one.metrics) for one in logged}
        logged += [one for one in result.logged if (one.step_key, one.step, *one.metrics) not in known]
    return replace(results[0], logged=logged)


def merged(results: Mapping[RoleGroup, TrainResult]) -> TrainResult:
    """Merges the metrics of a rollout from the groups, the policy's first.

    The times of another group overlap with the policy's, so its figures get its name: perf/forward_time ->
    perf/critic/forward_time.
    """
    (_, of_policy), *others = results.items()
    steps, perf, logged = of_policy.steps, dict(of_policy.perf), list(of_policy.logged)
    for group, result in others:
        steps = [theirs | ours for theirs, ours in zip(result.steps, steps, strict=True)]
        perf |= {name.replace("/", f"/{group.name}/", 1): value for name, value in result.perf.items()}
        logged += result.logged
    return TrainResult(steps, of_policy.rollout, perf, logged)
