"""Flags of the cluster section: the numbers of processes by kind, and their devices."""

from __future__ import annotations

from dataclasses import dataclass, field

from slime.config.fields import flag
from slime.config.ranges import COUNT, COUNT_OR_ZERO, SECONDS

PARTS = ("gradients", "parameters", "optimizer")
"""Values of --offload-train-parts: gradient buffers, whose contents are not needed between two training steps; weights
of model and reference; main weights and moments."""


@dataclass(frozen=True)
class ClusterConfig:
    """Numbers and devices of the processes. On a CPU host, a "GPU" in these names is one process."""

    device: str = flag(
        "auto",
        "device of the trainer; auto selects cuda if this machine has it",
        choices=("auto", "cpu", "cuda"),
    )
    actor_num_nodes: int = flag(1, "number of nodes that train", range=COUNT)
    actor_num_gpus_per_node: int = flag(8, "number of trainer ranks per node", range=COUNT)
    rollout_num_gpus: int = flag(
        None,
        "number of GPUs of all rollout engines together; with --colocate, all GPUs of the trainer",
        range=COUNT_OR_ZERO,
    )
    rollout_num_gpus_per_engine: int = flag(1, "number of GPUs per rollout engine", range=COUNT)
    rollout_engines_per_gpu: int = flag(
        1,
        "number of rollout engines that share a GPU; for small models, whose rollouts the CPU limits",
        range=COUNT,
    )
    num_gpus_per_node: int = flag(
        8, "number of GPUs per node (default with --gpu: as in its usual system)", range=COUNT
    )
    gpu: str | None = flag(
        None,
        "GPU that the layout is for; sets --device cuda and the number of GPUs per node if they are not given; vime "
        "plan checks the memory of this GPU",
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
    distributed_timeout_minutes: float = flag(
        10.0,
        "minutes until a collective that does not finish, or a trainer rank that does not answer, is an error; the "
        "trainer then starts again (--max-trainer-restarts)",
        range=SECONDS,
    )
    train_env_vars: dict[str, object] = flag(  # noqa: RUF009 (flag copies the default)
        {}, "environment variables of the trainer processes, as a JSON object"
    )
    trainer_roles: list[str] = field(default_factory=list)
    """Roles of a group of trainer ranks (`slime.roles.groups`), if this is a group's configuration; no flag sets it.
    The list is empty in the configuration of the whole run."""
