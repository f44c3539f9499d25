"""Flags of the cluster section: how many processes of each kind, and on which devices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from slime.config.fields import flag


@dataclass(frozen=True)
class ClusterConfig:
    """Placement. On a CPU host a "GPU" in these names is one process."""

    device: str = flag(
        "auto",
        "where training runs; auto takes cuda when this machine has it",
        choices=("auto", "cpu", "cuda"),
    )
    actor_num_nodes: int = flag(1, "nodes of the trainer")
    actor_num_gpus_per_node: int = flag(8, "trainer ranks on each node")
    rollout_num_gpus: int | None = flag(None, "GPUs of all rollout engines together; set by --colocate")
    rollout_num_gpus_per_engine: int = flag(1, "GPUs of one rollout engine")
    num_gpus_per_node: int = flag(8, "GPUs of a node; an engine may not be larger")
    colocate: bool = flag(False, "trainer and engines share the same GPUs and take turns")
    distributed_backend: str = flag(
        "nccl", "torch.distributed backend of the trainer; gloo on a CPU host", choices=("nccl", "gloo")
    )
    distributed_timeout_minutes: int = flag(10, "after how many minutes a stuck collective is an error")
    train_env_vars: dict[str, Any] = flag(  # noqa: RUF009 (flag copies the default)
        {}, "environment variables of the trainer processes, as a JSON object"
    )
