"""Where the engines of one served model are, and where more of them may start while the run goes on.

The places that the run reserved at its start stay its own until it ends: Ray gives a placement group back as a whole.
So an engine that joins takes the place of one that has left, or else devices of the cluster that are free, and the
latter are free again when it leaves. An engine that was started apart has no place here.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from slime.cluster.placement import Placement, place_engine
from slime.config import Config
from vime.pool import external
from vime.pool.control import MakeControl
from vime.pool.engine_server import EngineServer, EngineSpec
from vime.pool.member import EngineHandle
from vime.pool.ray_server import Seat, make_servers

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class EnginePlace:
    """The bundles of one engine in a placement group. `lent`: the group is that engine's alone."""

    placed: Placement
    bundles: Sequence[int]
    lent: bool = False


@dataclass
class Places:
    """`make_spec` makes the spec of the engine with an index. `joined`: the run is in a cluster that others started, so
    actors on the engines' nodes start the servers. `colocated`: trainers have the devices of these engines."""

    config: Config
    model: str
    make_spec: Callable[[int], EngineSpec]
    server: type[EngineServer]
    control: MakeControl
    joined: bool
    colocated: bool
    taken: dict[int, EnginePlace | external.Address] = field(default_factory=dict)
    """By the engine's index."""
    free: list[EnginePlace] = field(default_factory=list)
    count: int = 0
    """Engines so far. An index is used once, so that each engine has a log of its own."""

    def add(self, place: EnginePlace | external.Address) -> EngineSpec:
        """The spec of a new engine in `place`."""
        index, self.count = self.count, self.count + 1
        self.taken[index] = place
        return self.make_spec(index)

    def take(self, count: int) -> list[EngineSpec]:
        """Places for that many more engines. ValueError, with nothing taken, if there are too few."""
        if self.colocated:
            raise ValueError(
                "engines must have places of their own to join a run, got --colocate, which gives the places of "
                "engines to the trainer in turn; start the run without it"
            )
        found = self.free[:count]
        try:
            while len(found) < count:
                placed = place_engine(self.config, self.model)
                found.append(EnginePlace(placed, placed.engine_bundles[self.model][0], lent=True))
        except BaseException:
            for place in found:
                if place.lent:
                    place.placed.release()
            raise
        del self.free[:count]
        return [self.add(place) for place in found]

    def give_back(self, index: int) -> None:
        """The engine has ended: another one may have its place."""
        place = self.taken.pop(index)
        if isinstance(place, EnginePlace):
            if place.lent:
                place.placed.release()
            else:
                self.free.append(place)

    def spawn(self, spec: EngineSpec) -> EngineHandle:
        """The server of an engine, not started yet."""
        place = self.taken[spec.index]
        if not isinstance(place, EnginePlace):
            return external.ExternalEngine(replace(spec, **place), self.control)
        return make_servers(spec, self._seats(place), here=not self.joined, server=self.server)

    def is_apart(self, index: int) -> bool:
        """Whether the engine was started apart: this run does not end it."""
        return not isinstance(self.taken[index], EnginePlace)

    def where(self, index: int) -> str:
        """The place of an engine in words."""
        place = self.taken[index]
        if not isinstance(place, EnginePlace):
            return f"started apart, at {place['host']}"
        parts = []
        for part in place.placed.by_node(place.bundles):
            host = place.placed.nodes[part[0]].address if self.joined else socket.gethostname()
            names = ",".join(place.placed.gpus[bundle].name for bundle in part) if place.placed.gpus else ""
            parts.append(f"{host} GPU {names}" if names else host)
        return " + ".join(parts)

    def _seats(self, place: EnginePlace) -> list[Seat]:
        """Where the server processes of the engine run, one per node."""
        placed = place.placed
        return [
            Seat(
                placed.nodes[part[0]].address if self.joined else LOOPBACK,
                placed.visible(part),
                placed.buses(part),
                placed.options(part[0]),
            )
            for part in placed.by_node(place.bundles)
        ]
