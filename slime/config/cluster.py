"""Flags of the cluster section: how many processes of each kind, and on which devices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from slime.config.fields import flag
from slime.hardware import HARDWARE

PARTS = ("gradients", "parameters", "optimizer")
"""What --offload-train-parts may name: gradient buffers, whose contents nobody needs between two trainings; weights of
model and reference; main weights and moments."""


@dataclass(frozen=True)
class ClusterConfig:
    """Placement. On a CPU host a "GPU" in these names is one process."""

    device: str = flag(
        "auto",
        "where training runs; auto takes cuda when this machine has it",
        choices=("auto", "cpu", "cuda"),
    )
    actor_num_nodes: int = flag(1, "number of nodes that train")
    actor_num_gpus_per_node: int = flag(8, "number of trainer ranks per node")
    rollout_num_gpus: int | None = flag(
        None, "number of GPUs of all rollout engines together; with --colocate it follows from the trainer"
    )
    rollout_num_gpus_per_engine: int = flag(1, "number of GPUs per rollout engine")
    num_gpus_per_node: int = flag(8, "GPUs of a node (default with --gpu: those of its usual system)")
    gpu: str | None = flag(
        None,
        "GPU that the layout is made for: sets --device cuda and the GPUs of a node where they are not given; vime "
        "plan checks against its memory",
        choices=HARDWARE,
    )
    nvlink_domain_size: int | None = flag(
        None,
        "GPUs that NVLink connects: a tensor-parallel group stays inside them (default: what the driver reports, or "
        "else the GPUs of a node)",
    )
    colocate: bool = flag(False, "trainer and engines share the same GPUs and take turns")
    offload_train: bool | None = flag(
        None,
        "with --colocate: keep the trainer's state on the host while engines generate (default: vime "
        "decides by the memory estimate that vime plan prints; nothing on CPUs)",
    )
    offload_train_parts: list[str] | None = flag(  # noqa: RUF009
        None, "parts of the trainer's state that may go to the host (default: all)", choices=PARTS
    )
    offload_rollout: bool | None = flag(
        None,
        "engines sleep while the trainer works; always on with --colocate, never on without it",
    )
    offload: bool = flag(False, "the same as --offload-train --offload-rollout")
    distributed_backend: str = flag(
        "nccl", "torch.distributed backend of the trainer; gloo on a CPU host", choices=("nccl", "gloo")
    )
    distributed_timeout_minutes: int = flag(10, "minutes until a collective that does not end is an error")
    train_env_vars: dict[str, Any] = flag(  # noqa: RUF009 (flag copies the default)
        {}, "environment variables of the trainer processes, as a JSON object"
    )


def check_hardware(c: Any) -> None:
    """What --gpu names must be a device of the run, and a node of it must hold the trainer ranks of a node."""
    if c.gpu is None:
        return
    if c.device != "cuda":
        raise ValueError(
            f"--gpu must go with --device cuda, got --gpu {c.gpu} and --device {c.device}; leave out one"
        )
    if c.actor_num_gpus_per_node > c.num_gpus_per_node:
        raise ValueError(
            f"--actor-num-gpus-per-node must be at most --num-gpus-per-node with --gpu {c.gpu}, got "
            f"{c.actor_num_gpus_per_node} and {c.num_gpus_per_node}; use more nodes (--actor-num-nodes)"
        )


def check_offload(c: Any) -> None:
    """Only what takes turns on the same devices can make room for the other."""
    asked = {
        "--offload": c.offload,
        "--offload-train": c.offload_train,
        "--offload-rollout": c.offload_rollout,
    }
    given = [name for name, value in asked.items() if value]
    if given and not c.colocate:
        raise ValueError(
            f"{given[0]} must come with --colocate, got it without; trainer and engines have devices of their own"
        )
    if c.colocate and c.offload_rollout is False:
        raise ValueError(
            "--no-offload-rollout must be left out with --colocate, got it; engines sleep while the trainer works"
        )
    if c.offload and c.offload_train is False:
        raise ValueError("--offload must not stand beside --no-offload-train; leave one out")
    if c.offload_train_parts is not None and (not c.offload_train_parts or c.offload_train is False):
        got = "no part" if not c.offload_train_parts else "--no-offload-train"
        raise ValueError(
            f"--offload-train-parts must name parts that may leave the device, got {got}; leave the flag out"
        )
    if c.offload_train_parts and not c.colocate:
        raise ValueError("--offload-train-parts must come with --colocate, got it without; leave it out")
    if c.colocate and c.offload_train and c.megatron.overrides.get("nccl_ub"):
        raise ValueError(
            "--offload-train must not be combined with --nccl-ub, whose buffers are registered with NCCL; leave one out"
        )
