"""Defines the Ray actors of the trainer ranks. `slime.cluster.trainers` has the handles with which the loop calls
them."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import ray

from slime.cluster.calls import log_path
from slime.cluster.numa import bind, choose_cpus
from slime.cluster.rendezvous import open_store
from slime.config import Config
from slime.hardware import HARDWARE
from slime.protocols import TrainResult, WeightUpdate
from slime.system.allocator import choose_settings
from slime.system.imports import uncollected
from slime.tracking.run_record import record_warnings

if TYPE_CHECKING:
    from slime.data.rank_data import RankData
    from slime.operators import Decision
    from slime.types import TrainData


def log_to(config: Config, name: str) -> None:
    """Redirects the output of this process, from any library, to `{run_dir}/logs/{name}.log`."""
    path = log_path(config, name)
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        os.dup2(descriptor, stream.fileno())
    os.close(descriptor)


PROGRESS = {"progress": 1}
"""A separate concurrency group, so that a `progress` call does not wait for the actor's other calls."""
LIFE = {"life": 1}


def freeze_objects() -> None:
    """Excludes the objects that exist now from garbage collection: modules and models live as long as the process.

    The samples of a rollout trigger full collections, which took 0.2 s with half a million objects.
    """
    gc.collect()
    gc.freeze()


def return_freed_memory() -> None:
    """Returns freed host memory to the system, in all heaps of glibc. Takes 5 ms.

    The sizes of packed data differ from step to step, so freed blocks do not fit again: the trainer of a tiny model
    grew by half a MiB per step.
    """
    ctypes.CDLL(None).malloc_trim(0)


def other_gpu(named: str | None) -> list[str]:
    """Returns a remark if this process's GPU is not the GPU that --gpu names."""
    import torch

    if named is None or not torch.cuda.is_available():
        return []
    device = torch.cuda.get_device_name()
    return [] if device in HARDWARE[named].devices else [f"--gpu {named} was given, and the GPU is {device}"]


def use_node_folder(config: Config) -> Config:
    """Returns the configuration with this node's folder of --recover-from memory, and makes that folder's parent."""
    if (parent := config.checkpoint.memory_dir) is None:
        return config
    Path(parent).mkdir(mode=0o700, exist_ok=True)
    node = str(Path(parent) / ray.get_runtime_context().get_node_id())
    return config.with_values(memory_dir=node, restart_dir=config.checkpoint.restart_dir and node)


class TrainerActor:
    """Runs one trainer rank in a separate process. Megatron is imported here, never in the driver. `config` and `name`
    belong to its group of ranks."""

    def __init__(
        self,
        config: Config,
        name: str,
        rank: int,
        threads: int,
        env: dict[str, str],
        buses: tuple[str, ...],
    ) -> None:
        log_to(config, f"{name}-{rank}")
        self.remarks: list[str] = []
        if config.cluster.device == "cuda":  # before torch counts the CPUs that it may use
            cpus, line = choose_cpus(buses, config.cluster.numa_binding)
            if cpus:
                bind(cpus)
            self.remarks.append(f"NUMA: {line}")
        os.environ.update(env)  # CUDA and the collectives read these variables later, when they start
        os.environ.update({key: str(value) for key, value in config.cluster.train_env_vars.items()})
        if config.cluster.device == "cuda":
            flag, expand = config.cluster.train_env_vars, config.megatron.may_expand_segments
            choose_settings(os.environ, flag, expand=expand)
        self.config, self.rank = use_node_folder(config), rank
        self.scored: RankData | None = None
        if threads:
            import torch

            torch.set_num_threads(threads)

    def open_port(self) -> str:
        """Opens a torch.distributed address on this node. The port stays open, so that no other process takes the
        port."""
        address: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        self.store, init_method = open_store(address)
        return init_method

    def build(self, init_method: str) -> tuple[int, int, list[Decision], tuple[str, ...], list[str]]:
        """Builds the model.

        Returns the data-parallel rank, the first rollout to train, the decisions on operators, lines on the offloaded
        state, and remarks on the rank's GPU and CPUs.
        """
        with uncollected(freeze=True):
            from slime.megatron_backend.step.trainer import MegatronTrainer

        self.trainer = MegatronTrainer(
            self.config, self.rank, self.config.world_size, init_method=init_method
        )
        trainer = self.trainer
        record_warnings(trainer.events)
        freeze_objects()
        self.remarks += other_gpu(self.config.cluster.gpu)
        made = trainer.info.dp_rank, trainer.start_rollout_id, trainer.decisions, trainer.models.memory.lines
        return *made, self.remarks

    @ray.method(num_returns=2)
    def score(self, rollout_id: int, data: TrainData) -> tuple[None, TrainData]:
        """Computes the passes before training, if a run has several groups of ranks.

        Returns None, for which the driver waits, and the columns for the other groups, which Ray sends to their ranks
        and not to the driver.
        """
        from slime.cluster.images import with_files
        from slime.data.transport import pack_columns, unpack_columns

        self.scored = unpack_columns(with_files(data))
        return None, pack_columns(self.trainer.score(rollout_id, self.scored))

    def train(self, rollout_id: int, data: TrainData | None, *received: TrainData) -> TrainResult:
        """Trains a rollout. Without `data`, runs the second half of training, with the columns from the other groups'
        ranks."""
        from slime.cluster.images import with_files
        from slime.data.transport import unpack_columns

        whole = self.scored if data is None else unpack_columns(with_files(data))
        assert whole is not None, "score() comes first"
        result = self.trainer.train(rollout_id, whole, [unpack_columns(columns) for columns in received])
        self.scored = None
        return_freed_memory()
        return result

    def evaluate(self, rollout_id: int, names: list[str], *data: TrainData) -> dict[str, float]:
        """Computes the loss of held-out sets. `data` has one entry per name in `names`."""
        from slime.cluster.images import with_files
        from slime.data.transport import unpack_columns

        sets = {name: unpack_columns(with_files(columns)) for name, columns in zip(names, data, strict=True)}
        metrics = self.trainer.evaluate(rollout_id, sets)
        return_freed_memory()
        return metrics

    @ray.method(concurrency_group="progress")
    def progress(self) -> tuple[int, int]:
        return self.trainer.progress

    @ray.method(concurrency_group="progress")
    def answer(self) -> tuple[str, int]:
        """Returns Ray's id of the node, and the process id. A process that is stopped does not return."""
        return ray.get_runtime_context().get_node_id(), os.getpid()

    @ray.method(concurrency_group="life")
    def live(self) -> None:
        """Blocks until this process dies. The call fails then, so a caller that waits for the call notices the
        death."""
        threading.Event().wait()

    def save(self, rollout_id: int) -> None:
        self.trainer.save(rollout_id)

    def save_in_memory(self, rollout_id: int) -> None:
        self.trainer.save_in_memory(rollout_id)

    def finish_save(self) -> None:
        self.trainer.finish_save()

    def next_weights(self, version: int, receivers: dict[str, int]) -> WeightUpdate | None:
        return self.trainer.next_weights(version, receivers)

    def weights_file(self) -> WeightUpdate:
        return self.trainer.weights_file()
