"""Builds the engine pool of a run from its configuration and placement, for every backend. Does not start it."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import ray

from slime.cluster import placement
from slime.config import Config
from slime.protocols import WeightSource
from slime.roles.served import ServedModel
from vime.pool import external
from vime.pool.engine_server import EngineSpec
from vime.pool.pool import ServerPool
from vime.pool.ray_server import Seat, make_servers
from vime.pool.router import RouterSpec

if TYPE_CHECKING:
    from slime.cluster.placement import Placement


def make_pool(
    pool: type[ServerPool],
    config: Config,
    placed: Placement,
    source: WeightSource | None,
    model: ServedModel,
    make_spec: Callable[..., EngineSpec],
    *,
    dtype: str,
    gives_memory: bool = False,
) -> ServerPool:
    """The engines of `model` and their router; `config` is from `vime.pool.served.config_of`. `make_spec` gets the
    fields of an engine's spec that every engine has. `dtype` and `gives_memory`: see ServerPool."""
    run_key = external.given_key() if external.uses(config) else secrets.token_hex(32)
    logs = Path(config.logging.run_dir).resolve() / "logs"
    prefix = f"{model.name}-" if model.frozen else ""
    # Loopback, unless a cluster was joined: then engines may be on other nodes and listen at their node's address.
    joined = bool(os.environ.get("RAY_ADDRESS"))
    node_address: Callable[[], str] = ray.util.get_node_ip_address
    host = node_address() if joined else "127.0.0.1"
    specs = [
        make_spec(
            run_key=run_key,
            host=host,
            cpu_threads=placement.cpu_threads(config)[1] if config.cluster.device == "cpu" else 0,
            numa_binding=config.cluster.numa_binding,
            # An engine on a trainer's GPU measures what memory is left.
            waits=source is not None and config.cluster.colocate and config.cluster.device == "cuda",
            index=i,
            log_path=str(logs / f"{prefix}engine-{i}.log"),
        )
        for i in range(config.num_engines)
    ]
    seats = [_seats(placed, bundles, joined) for bundles in placed.engine_bundles[model.name]]
    elsewhere = external.addresses(config)
    router = RouterSpec(
        run_key=run_key,
        log_path=str(logs / f"{prefix}router.log"),
        gateway_host=host,
        argv=tuple(config.engine.router_argv),
        request_timeout_s=config.rollout.rollout_deadline_s,
        **({"host": host} | external.router_settings(config)),
    )
    parts = pool.kind
    return pool(
        specs,
        router,
        spawn=lambda spec: (
            external.ExternalEngine(replace(spec, **elsewhere[spec.index]), parts.control)
            if elsewhere
            else make_servers(spec, seats[spec.index], here=not joined, server=parts.server)
        ),
        source=source,
        health_check_interval_s=config.fault_tolerance.rollout_health_check_interval,
        health_check_timeout_s=config.fault_tolerance.rollout_health_check_timeout,
        health_check_first_wait_s=config.fault_tolerance.rollout_health_check_first_wait,
        dtype=dtype,
        gives_memory=gives_memory,
    )


def _seats(placed: Placement, bundles: Sequence[int], joined: bool) -> list[Seat]:
    """Where the server processes of the engine on `bundles` run, one per node."""
    return [
        Seat(
            placed.nodes[part[0]].address if joined else "127.0.0.1",
            placed.visible(part),
            placed.buses(part),
            placed.options(part[0]),
        )
        for part in placed.by_node(bundles)
    ]
