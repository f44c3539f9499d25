"""Starts engine servers on the nodes of their GPUs.

On the driver's host, the driver starts and watches a server. In an existing cluster that the run joined, a Ray actor on
the engine's node does this. Ray makes only one GPU visible to an actor. For an engine with several GPUs, the placement
sets the visible GPUs in `spec.env`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray

from vime.pool.engine_server import EngineServer, EngineSpec
from vime.pool.nodes_server import NodesServer

_QUICK_S = 5.0


class RayEngineServer:
    """Runs an EngineServer in a Ray actor, with the same interface. `options` are the actor's resources and placement.

    The server ends with the driver and with the actor, because the actor's process holds the supervisor's pipe.
    """

    def __init__(self, spec: EngineSpec, options: dict[str, object], server: type[EngineServer]) -> None:
        actor: Any = ray.remote(server)
        self._actor: Any = actor.options(max_concurrency=4, **options).remote(spec)

    def meeting_point(self) -> str:
        address: str = ray.get(self._actor.meeting_point.remote())
        return address

    def start(self, master: str = "") -> str:
        address: str = ray.get(self._actor.start.remote(master))
        return address

    def open_gate(self) -> None:
        ray.get(self._actor.open_gate.remote())

    def wait_ready(self) -> None:
        ray.get(self._actor.wait_ready.remote())

    def poll(self) -> int | None:
        """Returns the exit status, None while the server runs, or -1 if the actor is lost."""
        try:
            status: int | None = ray.get(self._actor.poll.remote())
            return status
        except ray.exceptions.RayActorError:
            return -1

    def whereabouts(self) -> tuple[str, bool]:
        """Works as EngineServer's method. The text names no process if the actor is lost or does not answer."""
        try:
            found: tuple[str, bool] = ray.get(self._actor.whereabouts.remote(), timeout=_QUICK_S)
            return found
        except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError):
            return "the Ray actor of its server does not answer", False

    def tail_log(self) -> str:
        try:
            lines: str = ray.get(self._actor.tail_log.remote())
            return lines
        except ray.exceptions.RayActorError as error:
            return f"(the log is on the node of a lost actor: {error})"

    def stop(self) -> None:
        try:
            ray.get(self._actor.stop.remote())
        except ray.exceptions.RayActorError:
            return
        ray.kill(self._actor)


@dataclass(frozen=True)
class Seat:
    """The node of an engine's server process: its address, the environment variables with the visible GPUs, their PCI
    buses, and the Ray options that start the actor on this node."""

    host: str
    visible: Mapping[str, str]
    gpu_buses: tuple[str, ...]
    options: Mapping[str, object]


def make_servers(
    spec: EngineSpec,
    seats: Sequence[Seat],
    *,
    here: bool,
    server: type[EngineServer],
) -> EngineServer | RayEngineServer | NodesServer:
    """Returns the handle of an engine with one server process per seat, in the order of its nodes.

    With `here`, all seats are on this host, and this process starts and watches the servers. Otherwise one actor per
    seat does this. `server` is the class of a seat's process.
    """
    log = Path(spec.log_path)
    specs = [
        replace(
            spec,
            host=seat.host,
            env={**spec.env, **seat.visible},
            gpu_buses=seat.gpu_buses,
            nodes=len(seats),
            node=node,
            log_path=str(log if node == 0 else log.with_name(f"{log.stem}-node-{node + 1}{log.suffix}")),
        )
        for node, seat in enumerate(seats)
    ]
    members: list[EngineServer | RayEngineServer]
    if here:
        members = [server(each) for each in specs]
    else:
        members = [
            RayEngineServer(each, dict(seat.options), server) for each, seat in zip(specs, seats, strict=True)
        ]
    return members[0] if len(members) == 1 else NodesServer(members)
