"""Assigns devices to the engines of a served model, also to engines that join during the run.

The run keeps the devices that it reserved at its start until it ends, because Ray releases a placement group as a
whole. An engine that joins takes reserved devices that another engine has left, or else free devices of the cluster.
The run releases devices of the second kind when the engine leaves. External engines (`vime.pool.external`) need no
devices.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from slime.cluster.placement import Placement, reserve_engine
from slime.config import Config
from vime.pool import external
from vime.pool.control import MakeControl
from vime.pool.engine_server import EngineServer, EngineSpec
from vime.pool.member import EngineHandle
from vime.pool.ray_server import Seat, make_servers

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class EngineSlot:
    """The bundles of an engine in a placement group. With `dedicated`, the group was made for this engine only."""

    placement: Placement
    bundles: Sequence[int]
    dedicated: bool = False


@dataclass
class EngineSlots:
    """The assigned and the free devices of a served model's engines.

    `make_spec` returns the spec of the engine with an index. With `joined`, the run is in an existing Ray cluster, so
    actors on the engines' nodes start the servers. With `colocated`, trainers share the devices of these engines.
    """

    config: Config
    model: str
    make_spec: Callable[[int], EngineSpec]
    server: type[EngineServer]
    control: MakeControl
    joined: bool
    colocated: bool
    taken: dict[int, EngineSlot | external.Address] = field(default_factory=dict)
    """Index of an engine -> its bundles, or the address of an external engine."""
    free: list[EngineSlot] = field(default_factory=list)
    count: int = 0
    """Number of engines so far, and the next index. Each engine gets a new index, so each has a separate log."""

    def add(self, slot: EngineSlot | external.Address) -> EngineSpec:
        """Registers a new engine in `slot` and returns its spec."""
        index, self.count = self.count, self.count + 1
        self.taken[index] = slot
        return self.make_spec(index)

    def take(self, count: int) -> list[EngineSpec]:
        """Reserves devices for `count` more engines and returns their specs. Raises ValueError, and reserves nothing,
        if too few devices are free."""
        if self.colocated:
            raise ValueError(
                "engines that join a run must not share devices with the trainer, got --colocate; start the run "
                "without --colocate"
            )
        found = self.free[:count]
        try:
            while len(found) < count:
                placement = reserve_engine(self.config, self.model)
                found.append(EngineSlot(placement, placement.engine_bundles[self.model][0], dedicated=True))
        except BaseException:
            for slot in found:
                if slot.dedicated:
                    slot.placement.release()
            raise
        del self.free[:count]
        return [self.add(slot) for slot in found]

    def give_back(self, index: int) -> None:
        """Frees the devices of an engine that has ended."""
        slot = self.taken.pop(index)
        if isinstance(slot, EngineSlot):
            if slot.dedicated:
                slot.placement.release()
            else:
                self.free.append(slot)

    def spawn(self, spec: EngineSpec) -> EngineHandle:
        """Returns the handle of an engine's server without starting it."""
        slot = self.taken[spec.index]
        if not isinstance(slot, EngineSlot):
            return external.ExternalEngine(replace(spec, **slot), self.control)
        return make_servers(spec, self._seats(slot), here=not self.joined, server=self.server)

    def is_external(self, index: int) -> bool:
        """Returns True for an external engine, which this run does not stop."""
        return not isinstance(self.taken[index], EngineSlot)

    def where(self, index: int) -> str:
        """Returns an engine's host and GPUs, or its address, as text."""
        slot = self.taken[index]
        if not isinstance(slot, EngineSlot):
            return f"external, at {slot['host']}"
        parts = []
        for part in slot.placement.by_node(slot.bundles):
            host = slot.placement.nodes[part[0]].address if self.joined else socket.gethostname()
            names = (
                ",".join(slot.placement.gpus[bundle].name for bundle in part) if slot.placement.gpus else ""
            )
            parts.append(f"{host} GPU {names}" if names else host)
        return " + ".join(parts)

    def _seats(self, slot: EngineSlot) -> list[Seat]:
        """Returns host, visible GPUs and Ray options per server process of the engine, one process per node."""
        placement = slot.placement
        return [
            Seat(
                placement.nodes[part[0]].address if self.joined else LOOPBACK,
                placement.visible(part),
                placement.buses(part),
                placement.options(
                    part[0], 1 if slot.dedicated else self.config.cluster.rollout_engines_per_gpu
                ),
            )
            for part in placement.by_node(slot.bundles)
        ]
