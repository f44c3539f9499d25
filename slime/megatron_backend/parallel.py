"""Starts torch.distributed and Megatron's process groups for one trainer rank.

Supports tensor, context, data and pipeline parallelism. Experts split the same ranks in another way: in each pipeline
stage, EP x ETP ranks share the experts, and each further group of EP x ETP ranks has a copy.
"""

from __future__ import annotations

import math
import random
import weakref
from dataclasses import dataclass
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from torch import nn

from slime.bridges.megatron import forget_groups
from slime.config import Config
from slime.megatron_backend.cpu_device import install_cpu_redirect
from slime.rules.experts import check_expert_ranks


@dataclass(frozen=True)
class ParallelInfo:
    """This process's ranks: rank = ((pp_rank * dp_size + dp_rank) * cp_size + cp_rank) * tp_size + tp_rank.

    Ranks that differ only in cp_rank or pp_rank get the same samples. Ranks with different cp_rank compute parts of
    a row, and ranks with different pp_rank compute different layers. `dp_cp_group` has all ranks whose gradients of
    a parameter are summed. The groups are live objects of this process, so do not send this record to other processes.
    """

    rank: int
    world_size: int
    tp_rank: int
    tp_size: int
    cp_rank: int
    cp_size: int
    dp_rank: int
    dp_size: int
    pp_rank: int
    pp_size: int
    device: torch.device
    tp_group: dist.ProcessGroup
    cp_group: dist.ProcessGroup
    dp_group: dist.ProcessGroup
    dp_cp_group: dist.ProcessGroup
    pp_group: dist.ProcessGroup

    @property
    def last_stage(self) -> bool:
        """Returns whether this rank has the model's last layers, the head and the loss."""
        return self.pp_rank == self.pp_size - 1


def _check(rank: int, world_size: int, config: Config) -> None:
    sizes = [
        config.megatron.tensor_model_parallel_size,
        config.megatron.pipeline_model_parallel_size,
        config.megatron.context_parallel_size,
    ]
    if min(sizes) < 1 or world_size % math.prod(sizes):
        raise ValueError(
            f"TP * PP * CP must divide the number of trainer ranks, got {' * '.join(map(str, sizes))} for {world_size}"
        )
    check_expert_ranks(config, world_size)
    if not 0 <= rank < world_size:
        raise ValueError(f"rank must lie in [0, world_size), got {rank} of {world_size}")


def init_parallel(
    rank: int, world_size: int, config: Config, *, init_method: str, local_rank: int = 0
) -> ParallelInfo:
    """Joins the trainer's process group and builds Megatron's groups. Every rank must call this function.

    `init_method` is torch's rendezvous address ("tcp://HOST:PORT" or "file://PATH"). `local_rank` is the index of this
    process's GPU. The backend is NCCL if CUDA is available, else gloo with redirected CUDA requests.
    The function reads the parallel sizes, --distributed-timeout-minutes and --seed. It seeds all generators (Python,
    numpy, torch, Megatron's tracker) from --seed, so a run repeats exactly on the same number of ranks.
    """
    _check(rank, world_size, config)
    install_cpu_redirect()
    if torch.cuda.is_available():
        torch.cuda.set_device(local_rank)
        backend, device = "nccl", torch.device("cuda", local_rank)
    else:
        backend, device = "gloo", torch.device("cpu")
    minutes = config.cluster.distributed_timeout_minutes
    dist.init_process_group(
        backend, init_method=init_method, rank=rank, world_size=world_size, timeout=timedelta(minutes=minutes)
    )
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=config.megatron.tensor_model_parallel_size,
        pipeline_model_parallel_size=config.megatron.pipeline_model_parallel_size,
        context_parallel_size=config.megatron.context_parallel_size,
        expert_model_parallel_size=config.megatron.expert_model_parallel_size,
        expert_tensor_parallel_size=config.megatron.expert_tensor_parallel_size,
        distributed_timeout_minutes=minutes,
        create_gloo_process_groups=False,
    )
    random.seed(config.train.seed)
    np.random.seed(config.train.seed)
    torch.manual_seed(config.train.seed)
    tensor_parallel.model_parallel_cuda_manual_seed(config.train.seed)
    info = ParallelInfo(
        rank=rank,
        world_size=world_size,
        tp_rank=parallel_state.get_tensor_model_parallel_rank(),
        tp_size=parallel_state.get_tensor_model_parallel_world_size(),
        cp_rank=parallel_state.get_context_parallel_rank(),
        cp_size=parallel_state.get_context_parallel_world_size(),
        dp_rank=parallel_state.get_data_parallel_rank(),
        dp_size=parallel_state.get_data_parallel_world_size(),
        pp_rank=parallel_state.get_pipeline_model_parallel_rank(),
        pp_size=parallel_state.get_pipeline_model_parallel_world_size(),
        device=device,
        tp_group=parallel_state.get_tensor_model_parallel_group(),
        cp_group=parallel_state.get_context_parallel_group(),
        dp_group=parallel_state.get_data_parallel_group(),
        dp_cp_group=parallel_state.get_data_parallel_group(with_context_parallel=True),
        pp_group=parallel_state.get_pipeline_model_parallel_group(),
    )
    _infos.append(info)
    return info


_infos: list[ParallelInfo] = []
_models: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""The models on the groups of `init_parallel`."""


def built(model: nn.Module) -> nn.Module:
    """Registers `model`, whose parts `destroy_parallel` will free, and returns it."""
    _models.add(model)
    return model


def destroy_parallel() -> None:
    """Leaves the groups of `init_parallel` and empties the models on them. A second call does nothing.

    A gloo group has three threads and four open files, which end with the last reference to the group. Megatron's
    modules hold groups, and a data-parallel wrapper is in a reference cycle with its gradient hooks. So a model that is
    only dropped keeps its groups until the garbage collector finds it, which never happens if the model was frozen. The
    traceback of an error may keep a ParallelInfo in the same way.
    """
    for holder in [*_infos, *(module for model in list(_models) for module in list(model.modules()))]:
        vars(holder).clear()
    _infos.clear()
    _models.clear()
    parallel_state.destroy_model_parallel()
    forget_groups()
    if dist.is_initialized():
        dist.destroy_process_group()
