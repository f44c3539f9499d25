"""Starts engine servers where their GPUs are.

On the driver's own host, the driver starts and watches a server. In a cluster that the run joined, a Ray actor on the
engine's node does. Ray shows an actor one GPU; the server of an engine with several GPUs sees the GPUs in `spec.env`,
which the placement sets.
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
    """EngineServer inside a Ray actor, with EngineServer's interface. `options` go to the actor (resources, placement).

    When the driver or the actor dies, so does the server: the actor's process holds the supervisor's pipe.
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
        """Exit status, None while it runs; -1 when the actor itself is gone."""
        try:
            status: int | None = ray.get(self._actor.poll.remote())
            return status
        except ray.exceptions.RayActorError:
            return -1

    def whereabouts(self) -> tuple[str, bool]:
        """See EngineServer. An actor that is lost or does not answer knows nothing of its processes."""
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
    """Where an engine's server process on one node runs: the node's address, the GPUs that it sees there as environment
    variables, their PCI buses, and the Ray options that bring its actor there."""

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
    """The handle of one engine with a server process in each of `seats`, in the order of its nodes. `here`: this
    process starts and watches them itself, because all seats are on its host. Otherwise an actor per seat does.
    `server` makes the process of one seat."""
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
