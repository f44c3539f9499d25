"""Where every actor runs: one Ray placement group with one bundle a device. Owns the arithmetic and its errors.

A device is a GPU, or on a host without GPUs half a CPU core: the trainers and engines of one small run share the cores,
and a laptop with two of them can hold every topology of the test suite.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

CORES_PER_CPU_DEVICE = 0.5
_PLACEMENT_TIMEOUT_S = 60


def connect() -> None:
    """Join the cluster at RAY_ADDRESS, or start one on this host that ends with this process.

    Its object store only carries rollout data, so a small
    one serves: Ray would reserve 30% of memory. What actors print goes to the run directory (actors.log_to).
    """
    # Ray makes a token by itself and says so each time; that is as it should be and no news to the reader.
    logging.getLogger("ray._private.authentication.authentication_token_setup").setLevel(logging.ERROR)
    quiet = {"log_to_driver": False, "logging_level": logging.WARNING}
    if os.environ.get("RAY_ADDRESS"):
        ray.init(**quiet)
    else:
        ray.init(address="local", include_dashboard=False, object_store_memory=512 * 2**20, **quiet)


def on_one_host(config: Any) -> bool:
    """Whether all processes of the run are on this host: no cluster was joined and one node is asked for."""
    return config.actor_num_nodes == 1 and not os.environ.get("RAY_ADDRESS")


@dataclass(frozen=True)
class Placement:
    """Bundles of the trainer ranks, in rank order, and of each engine (its first bundle hosts the server process)."""

    group: PlacementGroup
    resource: str
    trainer_bundles: list[int]
    engine_bundles: list[list[int]]
    share: float

    def options(self, bundle: int) -> dict[str, Any]:
        """Ray options that put an actor into `bundle`; trainer and engine of a colocated bundle take half each."""
        amount = self.share * (1 if self.resource == "GPU" else CORES_PER_CPU_DEVICE)
        strategy = PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=bundle)
        resources = {"num_gpus": amount, "num_cpus": 0} if self.resource == "GPU" else {"num_cpus": amount}
        return {**resources, "scheduling_strategy": strategy}

    def release(self) -> None:
        remove_placement_group(self.group)


def place(config: Any) -> Placement:
    """Reserve the devices of trainers and engines, or say what is needed and what exists.

    Colocated, engine i lives on the devices of trainer ranks [i*g, (i+1)*g); otherwise behind all trainers.
    """
    trainers = 0 if config.debug_rollout_only else config.actor_num_nodes * config.actor_num_gpus_per_node
    per_engine = config.rollout_num_gpus_per_engine
    engine_devices = 0 if config.debug_train_only else config.rollout_num_gpus
    first = 0 if config.colocate else trainers
    devices = max(trainers, engine_devices) if config.colocate else trainers + engine_devices
    resource = "GPU" if config.device == "cuda" else "CPU"
    amount = 1.0 if resource == "GPU" else CORES_PER_CPU_DEVICE
    existing = ray.cluster_resources().get(resource, 0.0)
    if devices * amount > existing:
        raise ValueError(
            f"the cluster must have {devices} devices ({devices * amount:g} {resource}s) for {trainers} trainer "
            f"ranks (--actor-num-nodes x --actor-num-gpus-per-node) and {engine_devices} rollout devices "
            f"(--rollout-num-gpus){', shared by --colocate' if config.colocate else ''}, got {existing:g} {resource}s; "
            "ask for fewer or join a larger cluster with RAY_ADDRESS"
        )
    group = placement_group([{resource: amount}] * devices, strategy="PACK")
    if not group.wait(_PLACEMENT_TIMEOUT_S):
        remove_placement_group(group)
        raise RuntimeError(
            f"{devices} devices must be free within {_PLACEMENT_TIMEOUT_S} s, got only "
            f"{ray.available_resources().get(resource, 0.0):g} of {existing:g} {resource}s; another job holds the rest"
        )
    return Placement(
        group=group,
        resource=resource,
        trainer_bundles=list(range(trainers)),
        engine_bundles=[
            list(range(first + start, first + start + per_engine))
            for start in range(0, engine_devices, per_engine)
        ],
        share=0.5 if config.colocate else 1.0,
    )


def cpu_threads(config: Any) -> tuple[int, int]:
    """Compute threads of (each trainer rank, each engine) on a CPU host.

    Colocated, trainers and engines take turns and each side gets all cores; otherwise they split them.
    """
    cores = os.cpu_count() or 1
    trainers = config.actor_num_nodes * config.actor_num_gpus_per_node
    engines = (
        max(config.rollout_num_gpus // config.rollout_num_gpus_per_engine, 1)
        if not config.debug_train_only
        else 0
    )
    if config.colocate or not engines:
        return max(cores // trainers, 1), max(cores // max(engines, 1), 1)
    each = max(cores // (trainers + engines), 1)
    return each, each
