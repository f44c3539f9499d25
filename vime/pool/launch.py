"""Builds the engine pool of a run from its configuration and placement, for every backend. Does not start it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

import ray

from slime.cluster import placement
from slime.config import Config
from slime.protocols import WeightSource
from slime.roles.served import ServedModel
from slime.tracking.events import Events
from vime.pool import external
from vime.pool.engine_server import EngineSpec, Role
from vime.pool.engine_slots import LOOPBACK, EngineSlot, EngineSlots
from vime.pool.pool import ServerPool
from vime.pool.router import RouterSpec
from vime.pool.state import Kind

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
    frees_memory: bool = False,
    kind: Kind | None = None,
) -> ServerPool:
    """Makes the pool of `model` with its router. `config` is the `settings` of `vime.pool.served.ServedEngines`.
    `make_spec` gets the fields that the specs of all engines have. See ServerPool for the other parameters."""
    run_key = external.resolve_run_key(config)
    logs = Path(config.logging.run_dir).resolve() / "logs"
    prefix = f"{model.name}-" if model.frozen else ""
    # Loopback, unless a cluster was joined: then engines may be on other nodes and listen at their node's address.
    joined = bool(os.environ.get("RAY_ADDRESS"))
    node_address: Callable[[], str] = ray.util.get_node_ip_address
    host = node_address() if joined else LOOPBACK

    def spec_for_index(index: int) -> EngineSpec:
        return make_spec(
            run_key=run_key,
            host=host,
            cpu_threads=placement.cpu_threads(config)[1] if config.cluster.device == "cpu" else 0,
            numa_binding=config.cluster.numa_binding,
            # An engine on a trainer's GPU measures what memory is left.
            waits=source is not None and config.cluster.colocate and config.cluster.device == "cuda",
            index=index,
            role=_role(config, model, index),
            log_path=str(logs / f"{prefix}engine-{index}.log"),
        )

    parts, colocated = kind or pool.kind, config.cluster.colocate
    slots = EngineSlots(config, model.name, spec_for_index, parts.server, parts.control, joined, colocated)
    own = [EngineSlot(placed, bundles) for bundles in placed.engine_bundles[model.name]]
    router = RouterSpec(
        run_key=run_key,
        log_path=str(logs / f"{prefix}router.log"),
        gateway_host=host,
        argv=tuple(config.engine.router_argv),
        request_timeout_s=config.rollout.rollout_deadline_s,
        **({"host": host} | external.router_settings(config)),
    )
    return pool(
        [slots.add(slot) for slot in (external.addresses(config) or own)],
        router,
        spawn=slots.spawn,
        slots=slots,
        events=Events("engines", config.logging.run_dir),
        model=model.name,
        source=source,
        **_health_checks(config, model),
        dtype=dtype,
        frees_memory=frees_memory,
        flush_interval=1 if model.frozen else config.weight_update.flush_interval,
        kind=parts,
    )


def _role(config: Config, model: ServedModel, index: int) -> Role:
    prefill = 0 if model.frozen else config.engine.prefill_num_servers or 0
    if not prefill:
        return "both"
    return "prefill" if index < prefill else "decode"


class HealthChecks(TypedDict):
    """Arguments of a pool: how it checks and replaces its engines."""

    health_check_interval_s: float
    health_check_timeout_s: float
    health_check_first_wait_s: float
    standby_after_s: float


def _health_checks(config: Config, model: ServedModel) -> HealthChecks:
    f = config.fault_tolerance
    return {
        "health_check_interval_s": f.rollout_health_check_interval,
        "health_check_timeout_s": f.rollout_health_check_timeout,
        "health_check_first_wait_s": f.rollout_health_check_first_wait,
        "standby_after_s": 0.0 if model.frozen else f.engine_standby_s,
    }
