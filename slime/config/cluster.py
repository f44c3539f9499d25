"""Flags of the cluster section: the number of processes of each kind, and their devices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from slime.config.fields import flag
from slime.config.problems import given
from slime.config.ranges import COUNT, COUNT_OR_ZERO
from slime.hardware import HARDWARE

if TYPE_CHECKING:
    from slime.config.schema import Config

PARTS = ("gradients", "parameters", "optimizer")
"""The values of --offload-train-parts: gradient buffers, whose contents are not needed between two training steps;
weights of model and reference; main weights and moments."""


@dataclass(frozen=True)
class ClusterConfig:
    """Placement. On a CPU host, a "GPU" in these names is one process."""

    device: str = flag(
        "auto",
        "device of the trainer; auto selects cuda if this machine has it",
        choices=("auto", "cpu", "cuda"),
    )
    actor_num_nodes: int = flag(1, "number of nodes that train", range=COUNT)
    actor_num_gpus_per_node: int = flag(8, "number of trainer ranks per node", range=COUNT)
    rollout_num_gpus: int | None = flag(
        None,
        "number of GPUs of all rollout engines together; with --colocate, all GPUs of the trainer",
        range=COUNT_OR_ZERO,
    )
    rollout_num_gpus_per_engine: int = flag(1, "number of GPUs per rollout engine", range=COUNT)
    num_gpus_per_node: int = flag(
        8, "number of GPUs per node (default with --gpu: as in its usual system)", range=COUNT
    )
    gpu: str | None = flag(
        None,
        "GPU that the layout is for; sets --device cuda and the number of GPUs per node if they are not given; vime "
        "plan checks the memory of this GPU",
        choices=HARDWARE,
    )
    nvlink_domain_size: int | None = flag(
        None,
        "number of GPUs that NVLink connects; a tensor-parallel group stays inside such a domain (default: what the "
        "GPU driver reports, or else the GPUs of a node)",
        range=COUNT,
    )
    numa_binding: str = flag(
        "auto",
        "auto: on hosts with GPUs and several NUMA nodes, trainer ranks and engines run on the CPUs nearest to "
        "their GPUs",
        choices=("auto", "off"),
    )
    allow_unauthenticated_ray: bool = flag(
        False,
        "join a Ray cluster (RAY_ADDRESS) that requires no token; everyone who can reach it can run code on it",
    )
    colocate: bool = flag(False, "trainer and engines share the same GPUs and take turns")
    offload_train: bool | None = flag(
        None,
        "with --colocate: keep the trainer's state on the host while engines generate (default: decided by "
        "the memory estimate that vime plan prints; off on CPUs)",
    )
    offload_train_parts: list[str] | None = flag(  # noqa: RUF009
        None, "parts of the trainer's state that may go to the host (default: all)", choices=PARTS
    )
    offload_rollout: bool | None = flag(
        None,
        "engines sleep while the trainer works; always on with --colocate, and off without it",
    )
    offload: bool = flag(False, "the same as --offload-train --offload-rollout")
    distributed_backend: str = flag(
        "nccl", "torch.distributed backend of the trainer; gloo on a CPU host", choices=("nccl", "gloo")
    )
    distributed_timeout_minutes: int = flag(
        10, "minutes until a collective that does not finish is an error", range=COUNT
    )
    train_env_vars: dict[str, Any] = flag(  # noqa: RUF009 (flag copies the default)
        {}, "environment variables of the trainer processes, as a JSON object"
    )


def check_hardware(c: Config) -> None:
    """--gpu needs --device cuda, and a node must have room for its trainer ranks."""
    if c.cluster.gpu is None:
        return
    if c.cluster.device != "cuda":
        raise ValueError(
            f"--gpu must go with --device cuda, got --gpu {c.cluster.gpu} and --device {c.cluster.device}; "
            "leave out one"
        )
    if c.cluster.actor_num_gpus_per_node > c.cluster.num_gpus_per_node:
        raise ValueError(
            f"--actor-num-gpus-per-node must be at most --num-gpus-per-node with --gpu {c.cluster.gpu}, got "
            f"{c.cluster.actor_num_gpus_per_node} and {c.cluster.num_gpus_per_node}; use more nodes (--actor-num-nodes)"
        )


def engine_tensor_parallel(c: Config) -> int:
    """Tensor-parallel size of an engine: its GPUs divided by its pipeline stages and data-parallel copies."""
    other = c.engine.engine_facts.pipeline_parallel_size * c.engine.engine_facts.data_parallel_size
    return c.cluster.rollout_num_gpus_per_engine // other or 1


def check_domains(c: Config) -> None:
    """If the size of an NVLink domain is known, every tensor-parallel group must fit inside one domain."""
    if c.cluster.device != "cuda" or not (
        size := c.cluster.nvlink_domain_size or (c.cluster.gpu and HARDWARE[c.cluster.gpu].nvlink_domain)
    ):
        return
    trainers = (
        0 if c.debug.debug_rollout_only else c.cluster.actor_num_nodes * c.cluster.actor_num_gpus_per_node
    )
    engines = 0 if c.debug.debug_train_only else given(c.cluster.rollout_num_gpus)
    devices = max(trainers, engines) if c.cluster.colocate else trainers + engines
    groups = {}
    if trainers:
        groups["--tensor-model-parallel-size"] = c.megatron.tensor_model_parallel_size
    if engines:
        groups["the tensor-parallel size of an engine (--rollout-num-gpus-per-engine)"] = (
            engine_tensor_parallel(c)
        )
    for name, group in groups.items():
        if group > size:
            raise ValueError(
                f"{name} must be at most the GPUs of an NVLink domain, got {group} and {size}; {_FIX}"
            )
        if devices > size and size % group:
            raise ValueError(
                f"{name} must divide the GPUs of an NVLink domain where a run needs several, got {group} and {size} = "
                f"{size // group} x {group} + {size % group} with {devices} GPUs; {_FIX}"
            )


_FIX = "lower it, or set --nvlink-domain-size to what NVLink connects"


def check_offload(c: Config) -> None:
    """Offload needs --colocate: only processes that share devices can make room for each other."""
    asked = {
        "--offload": c.cluster.offload,
        "--offload-train": c.cluster.offload_train,
        "--offload-rollout": c.cluster.offload_rollout,
    }
    given = [name for name, value in asked.items() if value]
    if given and not c.cluster.colocate:
        raise ValueError(
            f"{given[0]} must come with --colocate, got it without; trainer and engines have devices of their own"
        )
    if c.cluster.colocate and c.cluster.offload_rollout is False:
        raise ValueError(
            "--no-offload-rollout must be left out with --colocate, got it; engines sleep while the trainer works"
        )
    if c.cluster.offload and c.cluster.offload_train is False:
        raise ValueError("--offload must not stand beside --no-offload-train; leave one out")
    if c.cluster.offload_train_parts is not None and (
        not c.cluster.offload_train_parts or c.cluster.offload_train is False
    ):
        got = "no part" if not c.cluster.offload_train_parts else "--no-offload-train"
        raise ValueError(
            f"--offload-train-parts must name parts that may leave the device, got {got}; leave the flag out"
        )
    if c.cluster.offload_train_parts and not c.cluster.colocate:
        raise ValueError("--offload-train-parts must come with --colocate, got it without; leave it out")
    if c.cluster.colocate and c.cluster.offload_train and c.megatron.overrides.get("nccl_ub"):
        raise ValueError(
            "--offload-train must not be combined with --nccl-ub, whose buffers are registered with NCCL; leave one out"
        )
