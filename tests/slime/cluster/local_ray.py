"""Starts a Ray for a test file as a run starts its own: without idle workers, dashboard, agent, autoscaler and log
monitor, which together take 6 s of a core."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import ray

from slime import bridges
from slime.bridges.ray import PROCESSES
from slime.cluster.ray_start import _SETTINGS


@contextmanager
def local_ray(**resources: int) -> Iterator[None]:
    """Context with a Ray of one node with these resources (num_cpus, num_gpus)."""
    with bridges.applied(*PROCESSES):
        ray.init(
            address="local",
            include_dashboard=False,
            object_store_memory=80 * 2**20,
            log_to_driver=False,
            _system_config=_SETTINGS,
            **resources,
        )
    try:
        yield
    finally:
        ray.shutdown()
