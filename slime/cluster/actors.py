"""Ray actors around the rollout manager and the trainer ranks, and the handles through which the loop calls them."""

from __future__ import annotations

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
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

from slime.cluster.numa import bind, choose_cpus, format_cpus
from slime.cluster.placement import Placement, cpu_threads, on_one_host
from slime.cluster.rendezvous import LOOPBACK_ONLY, open_store
from slime.config import Config
from slime.config.problems import given
from slime.data.transport import pack_columns, unpack_columns
from slime.hardware import HARDWARE
from slime.operators import Decision
from slime.protocols import RolloutBatch, TrainResult, WeightUpdate
from slime.rollout.manager import RolloutManager


def log_path(config: Config, name: str) -> Path:
    return Path(given(config.logging.run_dir)).resolve() / "logs" / f"{name}.log"


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
    """A call of an actor failed. The text says which actor, and its own error; `log` is its log file, `details` the
    remote traceback, or what Ray has to say of a process that died."""

    def __init__(self, name: str, error: RayTaskError | RayActorError, log: Path) -> None:
        self.log, self.details = log, str(error)
        if isinstance(error, RayTaskError):
            said = f"{type(error.cause).__name__}: {error.cause}"
        else:
            said = (
                "its process died without an error of its own: it was killed, ran out of memory, or crashed"
            )
        super().__init__(f"{name} failed: {said}")


_DEATH_S = 3.0  # from the first complaint of a peer to Ray's word that a process is gone
_CHECK_S = 1.0
PROGRESS = {"progress": 1}
"""A concurrency group of its own, so that asking how far an actor is does not wait until it is done."""
LIFE = {"life": 1}


def freeze_objects() -> None:
    """Have the garbage collector leave out all that exists now, once a process is built: modules and models live as
    long as it does. Full collections, which a rollout's samples set off, took 0.2 s for half a million of them."""
    gc.collect()
    gc.freeze()


def other_gpu(named: str | None) -> list[str]:
    """A remark where this process's GPU is not the one that --gpu names."""
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
        visible: dict[str, str],
        buses: tuple[str, ...],
    ) -> None:
        log_to(config, f"trainer-{rank}")
        self.remarks: list[str] = []
        if config.cluster.device == "cuda":  # before torch counts the CPUs that it may use
            cpus, line = choose_cpus(buses, config.cluster.numa_binding)
            if cpus:
                bind(cpus)
            self.remarks.append(f"NUMA: {line}")
        os.environ.update(visible)  # CUDA looks when it starts, which is later
        os.environ.update({key: str(value) for key, value in config.cluster.train_env_vars.items()})
        self.config, self.rank, self.world_size = config, rank, world_size
        if threads:
            import torch

            torch.set_num_threads(threads)

    def open_port(self) -> str:
        """A torch.distributed address on this node. It stays open from here on, so that its port is nobody else's."""
        address: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        self.store, init_method = open_store(address)
        return init_method

    def build(self, init_method: str) -> tuple[int, int, list[Decision], tuple[str, ...], list[str]]:
        """Build the model; returns (data-parallel rank, first rollout to train, what its operators will run, what of
        its state leaves its device and why, remarks on its GPU and CPUs)."""
        from slime.megatron_backend.trainer import MegatronTrainer

        self.trainer = MegatronTrainer(self.config, self.rank, self.world_size, init_method=init_method)
        trainer = self.trainer
        freeze_objects()
        self.remarks += other_gpu(self.config.cluster.gpu)
        made = trainer.info.dp_rank, trainer.start_rollout_id, trainer.decisions, trainer.memory.lines
        return *made, self.remarks

    def train(self, rollout_id: int, data: dict[str, Any]) -> TrainResult:
        return self.trainer.train(rollout_id, unpack_columns(data))

    @ray.method(concurrency_group="progress")
    def progress(self) -> tuple[int, int]:
        return self.trainer.progress

    @ray.method(concurrency_group="life")
    def live(self) -> None:
        """Never returns: whoever waits for it learns that this process died."""
        threading.Event().wait()

    def save(self, rollout_id: int) -> None:
        self.trainer.save(rollout_id)

    def next_weights(self, version: int, receivers: dict[str, int]) -> WeightUpdate | None:
        return self.trainer.next_weights(version, receivers)

    def weights_file(self) -> WeightUpdate:
        return self.trainer.weights_file()


class TrainerGroup:
    """All trainer ranks. Implements slime.protocols.TrainerHandle: a call runs on every rank, its future holds rank
    0's answer."""

    def __init__(self, config: Config, placement: Placement) -> None:
        world_size = len(placement.trainer_bundles)
        threads = cpu_threads(config)[0] if placement.resource == "CPU" else 0
        env = {"OMP_NUM_THREADS": str(threads)} if threads else {}
        if on_one_host(config):
            env |= LOOPBACK_ONLY
        self._config = config
        self._threads = ThreadPoolExecutor(max_workers=3, thread_name_prefix="trainer-group")
        self._calling = threading.Lock()
        self._actors = [
            ray.remote(concurrency_groups=PROGRESS | LIFE)(TrainerActor)  # type: ignore[call-overload]
            .options(name=f"trainer-{rank}", runtime_env={"env_vars": env}, **placement.options(bundle))
            .remote(config, rank, world_size, threads, placement.visible([bundle]), placement.buses([bundle]))
            for rank, bundle in enumerate(placement.trainer_bundles)
        ]
        self.lives = {actor.live.remote(): f"trainer-{rank}" for rank, actor in enumerate(self._actors)}
        # Of ranks on this host a private file, because torch's store asks nobody for a key.
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
        """The answers of `building`; see `wait_built`."""
        self._dp_ranks = [dp_rank for dp_rank, *_ in built]
        _, self.start_rollout_id, self.decisions, self.memory, _ = built[0]
        ranks: dict[str, list[int]] = {}
        for rank, (*_, remarks) in enumerate(built):
            for remark in remarks:
                ranks.setdefault(remark, []).append(rank)
        self.remarks = [f"{remark}: trainer ranks {format_cpus(its)}" for remark, its in ranks.items()]

    def train(self, rollout_id: int, rank_data: list[Any]) -> Future[TrainResult]:
        data = [rank_data[dp_rank] for dp_rank in self._dp_ranks]
        return self._on_all(lambda actor, rank: actor.train.remote(rollout_id, data[rank]))

    def progress(self) -> tuple[int, int]:
        return ask_progress(self._actors[0])

    def save(self, rollout_id: int) -> Future[None]:
        return self._on_all(lambda actor, rank: actor.save.remote(rollout_id))

    def next_weights(self, version: int, receivers: dict[str, int]) -> Future[WeightUpdate | None]:
        return self._on_all(lambda actor, rank: actor.next_weights.remote(version, receivers))

    def weights_file(self) -> Future[WeightUpdate]:
        """The weights as they are once the ranks have done what they do now. From any thread."""
        return self._on_all(lambda actor, rank: actor.weights_file.remote())

    def _on_all(self, call: Callable[[Any, int], Any]) -> Future[Any]:
        """One call on every rank. The ranks get calls of several threads in the same order: each is a collective."""
        with self._calling:
            refs = [call(actor, rank) for rank, actor in enumerate(self._actors)]
        return self._threads.submit(lambda: self._results(refs)[0])

    def _results(self, refs: list[Any]) -> list[Any]:
        return first_failure_or_all(self._config, {ref: f"trainer-{rank}" for rank, ref in enumerate(refs)})

    def stop(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        for actor in self._actors:
            ray.kill(actor)
        if self._private is not None:
            self._private.cleanup()


def first_failure_or_all(
    config: Config,
    calls: dict[Any, str],
    lives: Mapping[Any, str] = MappingProxyType({}),
    *,
    check: Callable[[], None] | None = None,
) -> list[Any]:
    """Results of the calls (reference -> name of the actor), in order. `lives`: calls that end with their actor only.

    The first one that fails raises ActorError, while its peers still wait for it in a collective; and if a peer died,
    that one does: what others say of a broken collective comes of it, and may come first. `check` is called in every
    second without an answer, and what it raises ends the wait.
    """
    waiting, names = [*calls, *lives], {**lives, **calls}
    results: dict[Any, Any] = {}
    while len(results) < len(calls):
        every_s = None if check is None else _CHECK_S
        ended, waiting = ray.wait(waiting, timeout=every_s)  # ok: the call of an actor that dies ends, too
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


def _death_among(waiting: list[Any]) -> tuple[Any, RayActorError] | None:
    """The first of the calls whose actor's process is found dead within _DEATH_S."""
    end = time.monotonic() + _DEATH_S
    while waiting and (left_s := end - time.monotonic()) > 0:
        ended, waiting = ray.wait(waiting, num_returns=1, timeout=left_s)
        for ref in ended:
            try:
                ray.get(ref)
            except RayActorError as error:
                return ref, error
            except RayTaskError:
                pass  # one more that lost its peer
    return None


def ask_progress(actor: Any) -> tuple[int, int]:
    """How far an actor is; (0, 0) from one that is gone, whose call itself will tell why."""
    try:
        done: tuple[int, int] = ray.get(actor.progress.remote(), timeout=5)
        return done
    except (RayError, GetTimeoutError):
        return 0, 0


class RolloutActor(RolloutManager):
    """The rollout manager in its own process, which keeps its rank data in Ray's object store."""

    def __init__(self, config: Config) -> None:
        log_to(config, "rollout")
        self.config = config

    def build(self, engine: Any, dp_size: int, facts: dict[str, Any]) -> None:
        """Not in the constructor: of one that raises Ray says that the process died."""
        super().__init__(self.config, engine, dp_size, facts, lambda data: ray.put(pack_columns(data)))
        freeze_objects()

    @ray.method(concurrency_group="progress")
    def progress(self) -> tuple[int, int]:
        return self.state.progress


class RolloutGroup:
    """The rollout manager's actor. Implements slime.protocols.RolloutHandle. `lives` of the trainer: a rollout may take
    long, and who dies meanwhile is not asked for anything."""

    def __init__(
        self, config: Config, engine: Any, dp_size: int, facts: dict[str, Any], lives: Mapping[Any, str]
    ) -> None:
        self._config, self._lives = config, lives
        self._threads = ThreadPoolExecutor(max_workers=1, thread_name_prefix="rollout-group")
        remote = ray.remote(concurrency_groups=PROGRESS)  # type: ignore[call-overload]
        actor = remote(RolloutActor).options(num_cpus=0)
        self._actor = actor.remote(config)
        self.building = {self._actor.build.remote(engine, dp_size, facts): "rollout"}

    def load(self, start_rollout_id: int) -> None:
        """Bring the data source to where it stood before rollout `start_rollout_id`."""
        self._result(self._actor.load.remote(start_rollout_id))

    def progress(self) -> tuple[int, int]:
        return ask_progress(self._actor)

    def generate(self, rollout_id: int) -> Future[RolloutBatch]:
        return self._threads.submit(self._result, self._actor.generate.remote(rollout_id))

    def evaluate(self, rollout_id: int) -> Future[dict[str, float]]:
        return self._threads.submit(self._result, self._actor.evaluate.remote(rollout_id))

    def _result(self, ref: Any) -> Any:
        return first_failure_or_all(self._config, {ref: "rollout"}, self._lives)[0]

    def stop(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        ray.kill(self._actor)


def wait_built(
    config: Config,
    trainer: TrainerGroup | None,
    rollout: RolloutGroup,
    check: Callable[[], None] | None = None,
) -> None:
    """Returns when every rank has its model and the rollout manager its data; whoever fails first ends the wait.
    `check`: see `first_failure_or_all`."""
    ranks = {} if trainer is None else trainer.building
    answers = first_failure_or_all(config, {**ranks, **rollout.building}, check=check)
    if trainer is not None:
        trainer.take_built(answers[: len(ranks)])
