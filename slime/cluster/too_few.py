"""Describes, for an error, the resources that a run needs and a cluster lacks: the ranks and engines, and the flag with
the number to give."""

from __future__ import annotations

import math

from slime.config import Config
from slime.roles.groups import build_groups
from slime.roles.served import served_models

CORES_PER_CPU_DEVICE = 0.5
"""CPU cores per device on a host without GPUs; see `slime.cluster.placement`."""


def needed(config: Config, of_policy: int) -> str:
    """Lists the parts that need the devices, and the flags with their numbers. `of_policy` is the number of devices of
    the policy's engines."""
    groups = () if config.debug.debug_rollout_only else build_groups(config)
    ranks = ", ".join(
        f"{group.ranks} {group.name} ranks (--{group.flags}-num-nodes x --{group.flags}-num-gpus-per-node)"
        for group in groups
    )
    shared = ", shared by --colocate" if config.cluster.colocate else ""
    frozen = "".join(
        f", and {model.devices} of {model.name} ({model.spelling.of('--rollout-num-gpus')})"
        for model in served_models(config)
        if model.frozen
    )
    return (
        f"{ranks or 'no trainer rank'} and {of_policy} rollout devices (--rollout-num-gpus){shared}{frozen}"
    )


def each_takes(config: Config) -> str:
    """Returns the share of a CPU per rank and rollout device. The text is empty for GPUs."""
    return (
        "" if config.cluster.device == "cuda" else ", of which each rank and each rollout device takes a half"
    )


def fewer(config: Config, devices: int, existing: int) -> str:
    """Returns the remedy for a run that needs `devices` and finds `existing`: the flags with which it fits."""
    flags = _fitting(config, devices, existing)
    return f"give {' '.join(flags)} here," if flags else "ask for fewer"


def _fitting(config: Config, devices: int, existing: int) -> list[str]:
    """Returns replacements for the run's flags. The list is empty if other numbers would have to change too."""
    c = config.cluster
    if config.debug.debug_rollout_only or len(build_groups(config)) > 1:
        return []
    engines = c.rollout_num_gpus
    if c.colocate:
        more = devices - max(config.world_size, engines)  # devices of frozen models
        ranks = engines = existing - more
        engines = engines if c.rollout_num_gpus > engines else c.rollout_num_gpus
    else:
        ranks = existing - (devices - config.world_size)
        if ranks < 1:  # as many engines as fit with a single rank per node
            ranks, engines = existing // 2, existing // 2
            engines = min(engines, c.rollout_num_gpus)
    megatron = config.megatron
    model = math.prod(
        (
            megatron.tensor_model_parallel_size,
            megatron.pipeline_model_parallel_size,
            megatron.context_parallel_size,
        )
    )
    per_node = min(c.actor_num_gpus_per_node, ranks // c.actor_num_nodes)
    if c.actor_num_nodes == 1:
        per_node -= per_node % model
    engines -= engines % c.rollout_num_gpus_per_engine
    if per_node < 1 or engines < min(1, c.rollout_num_gpus) or per_node * c.actor_num_nodes % model:
        return []
    flags = []
    if per_node < c.actor_num_gpus_per_node:
        flags += ["--actor-num-gpus-per-node", str(per_node)]
    if engines < c.rollout_num_gpus:
        flags += ["--rollout-num-gpus", str(engines)]
    return flags
