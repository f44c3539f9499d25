"""The state of an engine pool: its engines, router, weight updates and events.

Supervision (`vime.pool.pool`), engines that join and leave (`vime.pool.changes`) and weight updates
(`slime.weight_sync.transfer`) work on one `PoolState`.
"""

from __future__ import annotations

import errno
import http.client
import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from slime.protocols import RolloutEngine, WeightSource, WeightUpdate
from slime.tracking.events import Events
from slime.weight_sync.transfer import Engine, WeightTransfer
from vime.pool.control import ControlError, EngineLoad, MakeControl, PauseMode
from vime.pool.engine_server import EngineServer, EngineSpec, Standby
from vime.pool.member import EngineHandle, Member, Spawn
from vime.pool.router import RouterServer, RouterSpec

if TYPE_CHECKING:
    from vime.pool.engine_slots import EngineSlots

logger = logging.getLogger(__name__)
_UNREACHABLE = (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ENETDOWN, errno.EHOSTDOWN)
"""Errors of a network that was cut. The engine may answer again when the network is back."""


@dataclass(frozen=True)
class Kind:
    """The classes of one backend. `workers` is the router's route that lists the engines. `worker_path` returns the
    path prefix of the engines' URLs in that list, for the run's key."""

    control: MakeControl
    client: Callable[..., RolloutEngine]
    router: Callable[[RouterSpec], RouterServer]
    server: type[EngineServer]
    workers: str
    worker_path: Callable[[str], str]


@dataclass(kw_only=True)
class PoolState:
    """The state of one pool. It is the `slime.weight_sync.transfer.UpdatedEngines` of the pool's weight updates.

    The lock of `transfer` also guards `members`. `patience_s` is the time after which an engine that does not answer
    counts as dead.
    """

    kind: Kind
    router: RouterServer
    spawn: Spawn
    pause_mode: PauseMode
    slots: EngineSlots | None
    events: Events
    model: str
    patience_s: float
    standby: Standby
    members: list[Member] = field(default_factory=list)
    stopping: threading.Event = field(default_factory=threading.Event)
    lost: str | None = None
    """The error after which the run cannot go on."""
    transfer: WeightTransfer = field(init=False)

    def follow(
        self, source: WeightSource | None, *, frees_memory: bool, flush_interval: int | None = 1
    ) -> None:
        """Sets up the weight updates of this pool. `source` is the trainer, or None for frozen weights."""
        self.transfer = WeightTransfer(
            self,
            source,
            frees_memory=frees_memory,
            flush_interval=flush_interval,
            on_loaded=self.record_part,
        )

    def make(self, spec: EngineSpec) -> Member:
        """Returns a new entry of the pool. Its server is not started, and `members` does not contain it yet."""
        return Member(spec, spec.index, self.pause_mode, self.kind.control)

    def launch(self, member: Member) -> None:
        """Starts the engine's server."""
        member.launch(self._spawn_with_standby)
        location = self.slots.where(member.spec.index) if self.slots else ""
        self.record(member, "starting", address=member.control.url, place=location)

    def _spawn_with_standby(self, spec: EngineSpec) -> EngineHandle:
        handle = self.spawn(spec)
        if isinstance(handle, EngineServer):  # other handles start the server on another node
            handle.standby = self.standby
        return handle

    def keep_standby(self) -> None:
        """Starts the standby process for the next replaced engine, if all engines serve."""
        if self.members and len(self.serving_members()) == len(self.members):
            self.standby.keep(self.kind.server, self.members[0].spec)

    def admit(self, member: Member) -> None:
        """Registers the engine with the router, which then sends it requests."""
        if not member.is_prefill:
            self.send_prefills([member])
            self.router.add(member.control.url)
        member.doomed, member.serving = False, True
        if member.is_prefill:
            self.send_prefills()
        self.record(member, "serving", version=self.transfer.version)

    def send_prefills(self, decoders: Sequence[Member] | None = None) -> None:
        """Sends the addresses of the serving prefill engines to `decoders` (default: all serving decode engines). A
        decode engine that does not answer keeps its list. It computes a prompt itself if a prefill engine is gone, and
        the monitor replaces it if it is dead."""
        serving = self.serving_members()
        urls = [member.control.url for member in serving if member.is_prefill and not member.leaving]
        for member in serving if decoders is None else decoders:
            if member.spec.role != "decode":
                continue
            try:
                member.control.use_prefill_engines(urls)
            except (ControlError, OSError, http.client.HTTPException) as error:
                logger.warning("engine %s keeps its list of prefill engines: %s", member.control.url, error)

    def leave_router(self, member: Member) -> None:
        """Stops new requests to the engine. They come from the router, or to a prefill engine from decode engines."""
        if member.is_prefill:
            self.send_prefills()
        else:
            self.router.remove(member.control.url)

    def serving_members(self) -> list[Member]:
        return [member for member in self.members if member.serving]

    def serving(self) -> list[Engine]:
        """Returns the engines that serve at the moment."""
        return [*self.serving_members()]

    def on_serving(self, act: Callable[[Engine], None]) -> None:
        """Calls `act` on all serving engines at the same time. An engine that no longer runs or answers stops serving,
        and the monitor replaces it, even if it answers later, because it may have done a part of the call."""

        def acted(member: Member) -> None:
            try:
                act(member)
            except (ControlError, OSError, http.client.HTTPException) as error:
                cut = isinstance(error, OSError) and error.errno in _UNREACHABLE
                if member.is_alive(self.patience_s) and not cut:
                    raise
                member.serving, member.doomed = False, True
                logger.warning("engine %s is replaced: a control call failed (%s)", member.control.url, error)

        each(self.serving_members(), acted)

    def stop_starting(self) -> None:
        """Stops the servers that are starting, because they take device memory. They start again after the wake-up."""
        each([member for member in self.members if member.starting], Member.stop)

    def check_health(self) -> None:
        """Raises RuntimeError with the last log lines if an engine or the router cannot be restarted."""
        if self.lost is not None:
            raise RuntimeError(self.lost)

    def record(self, member: Member, state: str, **more: object) -> None:
        """Writes an event of an engine."""
        self.events.add("engine", model=self.model, engine=member.title, state=state, **more)

    def record_load(self, member: Member, load: EngineLoad) -> None:
        fields = {"running": load.running, "waiting": load.waiting, "kv_cache": round(load.kv_cache, 4)}
        self.events.add("load", model=self.model, engine=member.title, **fields)

    def record_part(self, part: WeightUpdate, index: int, seconds: float) -> None:
        fields = {"version": part.version, "part": index, "bytes": part.size_bytes}
        self.events.add("part", model=self.model, seconds=round(seconds, 4), **fields)


def each(members: Sequence[Member], act: Callable[[Member], None]) -> None:
    """Calls `act` on all members at the same time, and raises the first error when all calls have ended."""
    if not members:
        return
    with ThreadPoolExecutor(len(members)) as threads:
        list(threads.map(act, members))
