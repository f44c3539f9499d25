"""Ray actors of the trainer ranks, and the handle with which the loop calls them."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias

import ray
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

from slime.cluster.numa import bind, choose_cpus, format_cpus
from slime.cluster.placement import Placement, cpu_threads, on_one_host
from slime.cluster.rendezvous import LOOPBACK_ONLY, open_store
from slime.config import Config
from slime.data.transport import unpack_columns
from slime.hardware import HARDWARE
from slime.imports import uncollected
from slime.operators import Decision
from slime.protocols import TrainResult, WeightUpdate
from slime.types import TrainData

Actor: TypeAlias = "ActorHandle[Any]"
"""The handle of a process, whose methods are remote."""

Ref: TypeAlias = "ray.ObjectRef[Any]"
"""A call of an actor, whose result Ray stores."""


def log_path(config: Config, name: str) -> Path:
    return Path(config.logging.run_dir).resolve() / "logs" / f"{name}.log"


def log_to(config: Config, name: str) -> None:
    """Send everything this process prints, from any library, to `{run_dir}/logs/{name}.log`."""
    path = log_path(config, name)
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        os.dup2(descriptor, stream.fileno())
    os.close(descriptor)


class ActorError(RuntimeError):
    """A call of an actor failed. The message has the actor's name and the actor's error. `log` is the actor's log
    file. `details` is the remote traceback, or Ray's report on a process that died."""

    def __init__(self, name: str, error: RayTaskError | RayActorError, log: Path) -> None:
        self.log, self.details = log, str(error)
        if isinstance(error, RayTaskError):
            said = f"{type(error.cause).__name__}: {error.cause}"
        else:
            said = (
                "its process died without an error of its own: it was killed, ran out of memory, or crashed"
            )
        super().__init__(f"{name} failed: {said}")


_DEATH_S = 3.0  # after a first failure, the time for Ray to report a dead process
_CHECK_S = 1.0
PROGRESS = {"progress": 1}
"""A separate concurrency group, so that a `progress` call does not wait for the actor's other calls."""
LIFE = {"life": 1}


def freeze_objects() -> None:
    """Exclude the objects that exist now from garbage collection: modules and models live as long as the process.

    The samples of a rollout trigger full collections, which took 0.2 s with half a million objects.
    """
    gc.collect()
    gc.freeze()


def return_freed_memory() -> None:
    """Return the host memory that was freed to the system, in all heaps of glibc. Packed data has other sizes in each
    step, so that freed blocks do not fit again: the trainer of a tiny model grew by half a MiB a step. Takes 5 ms."""
    ctypes.CDLL(None).malloc_trim(0)


def other_gpu(named: str | None) -> list[str]:
    """A remark if this process's GPU is not the GPU that --gpu names."""
    import torch

    if named is None or not torch.cuda.is_available():
        return []
    device = torch.cuda.get_device_name()
    return [] if device in HARDWARE[named].devices else [f"--gpu {named} was given, and the GPU is {device}"]


class TrainerActor:
    """One trainer rank in its own process. Megatron is imported here, never in the driver."""

    def __init__(
        self,
        config: Config,
        rank: int,
        world_size: int,
        threads: int,
        env: dict[str, str],
        buses: tuple[str, ...],
    ) -> None:
        log_to(config, f"trainer-{rank}")
        self.remarks: list[str] = []
        if config.cluster.device == "cuda":  # before torch counts the CPUs that it may use
            cpus, line = choose_cpus(buses, config.cluster.numa_binding)
            if cpus:
                bind(cpus)
            self.remarks.append(f"NUMA: {line}")
        os.environ.update(
            env
        )  # CUDA and the collectives read these variables when they start, which is later
        os.environ.update({key: str(value) for key, value in config.cluster.train_env_vars.items()})
        self.config, self.rank, self.world_size = config, rank, world_size
        if threads:
            import torch

            torch.set_num_threads(threads)

    def open_port(self) -> str:
        """A torch.distributed address on this node. The port stays open, so that no other process takes the port."""
        address: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        self.store, init_method = open_store(address)
        return init_method

    def build(self, init_method: str) -> tuple[int, int, list[Decision], tuple[str, ...], list[str]]:
        """Build the model. Return the data-parallel rank, the first rollout to train, the decisions on operators, the
        lines on the state that leaves the device and why, and the remarks on the rank's GPU and CPUs."""
        with uncollected(freeze=True):
            from slime.megatron_backend.step.trainer import MegatronTrainer

        self.trainer = MegatronTrainer(self.config, self.rank, self.world_size, init_method=init_method)
        trainer = self.trainer
        freeze_objects()
        self.remarks += other_gpu(self.config.cluster.gpu)
        made = trainer.info.dp_rank, trainer.start_rollout_id, trainer.decisions, trainer.models.memory.lines
        return *made, self.remarks

    def train(self, rollout_id: int, data: TrainData) -> TrainResult:
        result = self.trainer.train(rollout_id, unpack_columns(data))
        return_freed_memory()
        return result

    @ray.method(concurrency_group="progress")
    def progress(self) -> tuple[int, int]:
        return self.trainer.progress

    @ray.method(concurrency_group="life")
    def live(self) -> None:
        """Never returns. The call fails when this process dies, so a caller that waits for the call learns of it."""
        threading.Event().wait()

    def save(self, rollout_id: int) -> None:
        self.trainer.save(rollout_id)

    def finish_save(self) -> None:
        self.trainer.finish_save()

    def next_weights(self, version: int, receivers: dict[str, int]) -> WeightUpdate | None:
        return self.trainer.next_weights(version, receivers)

    def weights_file(self) -> WeightUpdate:
        return self.trainer.weights_file()


class TrainerGroup:
    """All trainer ranks. Implements slime.protocols.TrainerHandle. A call runs on every rank, and its future holds
    the answer of rank 0."""

    def __init__(self, config: Config, placement: Placement) -> None:
        world_size = len(placement.trainer_bundles)
        threads = cpu_threads(config)[0] if placement.resource == "CPU" else 0
        shared = LOOPBACK_ONLY if on_one_host(config) else {}
        self._config = config
        self._threads = ThreadPoolExecutor(max_workers=3, thread_name_prefix="trainer-group")
        self._calling = threading.Lock()
        self._actors = [
            ray.remote(concurrency_groups=PROGRESS | LIFE)(TrainerActor)  # type: ignore[call-overload]
            .options(name=f"trainer-{rank}", **placement.options(bundle))
            .remote(
                config,
                rank,
                world_size,
                threads,
                {**shared, **placement.visible([bundle])},
                placement.buses([bundle]),
            )
            for rank, bundle in enumerate(placement.trainer_bundles)
        ]
        self.lives = {actor.live.remote(): f"trainer-{rank}" for rank, actor in enumerate(self._actors)}
        # Ranks on one host meet through a private file, because torch's network store checks no key.
        self._private = None
        if on_one_host(config):
            self._private = tempfile.TemporaryDirectory(prefix="vime-rendezvous-", ignore_cleanup_errors=True)
            init_method = f"file://{self._private.name}/store"
        else:
            (init_method,) = self._results([self._actors[0].open_port.remote()])
        self.building = {
            actor.build.remote(init_method): f"trainer-{rank}" for rank, actor in enumerate(self._actors)
        }

    def take_built(self, built: list[Any]) -> None:
        """Store the answers of `building`; see `wait_built`."""
        self._dp_ranks = [dp_rank for dp_rank, *_ in built]
        _, self.start_rollout_id, self.decisions, self.memory, _ = built[0]
        ranks: dict[str, list[int]] = {}
        for rank, (*_, remarks) in enumerate(built):
            for remark in remarks:
                ranks.setdefault(remark, []).append(rank)
        self.remarks = [f"{remark}: trainer ranks {format_cpus(its)}" for remark, its in ranks.items()]

    def train(self, rollout_id: int, rank_data: list[object]) -> Future[TrainResult]:
        data = [rank_data[dp_rank] for dp_rank in self._dp_ranks]
        return self._on_all(lambda actor, rank: actor.train.remote(rollout_id, data[rank]))

    def progress(self) -> tuple[int, int]:
        return ask_progress(self._actors[0])

    def save(self, rollout_id: int) -> Future[None]:
        return self._on_all(lambda actor, rank: actor.save.remote(rollout_id))

    def finish_save(self) -> Future[None]:
        return self._on_all(lambda actor, rank: actor.finish_save.remote())

    def next_weights(self, version: int, receivers: dict[str, int]) -> Future[WeightUpdate | None]:
        return self._on_all(lambda actor, rank: actor.next_weights.remote(version, receivers))

    def weights_file(self) -> Future[WeightUpdate]:
        """The weights after the calls that the ranks run now. Any thread may call this method."""
        return self._on_all(lambda actor, rank: actor.weights_file.remote())

    def _on_all(self, call: Callable[[Actor, int], Ref]) -> Future[Any]:
        """Call every rank. A call is a collective, so all ranks must get the calls of several threads in one order."""
        with self._calling:
            refs = [call(actor, rank) for rank, actor in enumerate(self._actors)]
        return self._threads.submit(lambda: self._results(refs)[0])

    def _results(self, refs: list[Ref]) -> list[Any]:
        return first_failure_or_all(self._config, {ref: f"trainer-{rank}" for rank, ref in enumerate(refs)})

    def stop(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        for actor in self._actors:
            ray.kill(actor)
        if self._private is not None:
            self._private.cleanup()


def first_failure_or_all(
    config: Config,
    calls: dict[Ref, str],
    lives: Mapping[Ref, str] = MappingProxyType({}),
    *,
    check: Callable[[], None] | None = None,
) -> list[Any]:
    """Results of the calls (reference -> name of the actor), in order. `lives`: calls that end only with their actor.

    The first call that fails raises ActorError at once, because its peers may still wait for it in a collective. If a
    peer died, the ActorError names that peer. Its death breaks the collective, and the other ranks may report the
    broken collective first. `check` is called after each second without a result. An exception of `check` ends the
    wait.
    """
    waiting, names = [*calls, *lives], {**lives, **calls}
    results: dict[Ref, Any] = {}
    while len(results) < len(calls):
        every_s = None if check is None else _CHECK_S
        ended, waiting = ray.wait(waiting, timeout=every_s)  # ok: the call also ends if its actor dies
        if not ended and check is not None:
            check()
            continue
        (done,) = ended
        try:
            results[done] = ray.get(done)
        except RayActorError as error:
            raise ActorError(names[done], error, log_path(config, names[done])) from None
        except RayTaskError as error:
            failed, why = _death_among(waiting) or (done, error)
            raise ActorError(names[failed], why, log_path(config, names[failed])) from None
    return [results[ref] for ref in calls]


def _death_among(waiting: list[Ref]) -> tuple[Ref, RayActorError] | None:
    """The first call whose actor Ray reports as dead within _DEATH_S seconds, and Ray's error."""
    end = time.monotonic() + _DEATH_S
    while waiting and (left_s := end - time.monotonic()) > 0:
        ended, waiting = ray.wait(waiting, num_returns=1, timeout=left_s)
        for ref in ended:
            try:
                ray.get(ref)
            except RayActorError as error:
                return ref, error
            except RayTaskError:
                pass  # this actor lives, and also lost its peer
    return None


def ask_progress(actor: Actor) -> tuple[int, int]:
    """How far an actor is. (0, 0) for an actor that died: the call that the actor ran reports why."""
    try:
        call: ray.ObjectRef[tuple[int, int]] = actor.progress.remote()
        return ray.get(call, timeout=5)
    except (RayError, GetTimeoutError):
        return 0, 0
