"""Adds engines to a running pool, and removes them (`vime engines add` and `remove`).

    add:     take free devices -> start the server -> load the present weights -> register with the router
    remove:  leave the router -> wait for its requests -> leave the pool -> end the server -> free the devices

An engine that joins goes through the same steps as an engine that restarts. An engine that leaves takes part in weight
updates until it has no requests, or until its time has passed. Another engine then runs its remaining requests from
their beginning, as after a death.
"""

from __future__ import annotations

import http.client
import json
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from vime.pool import external
from vime.pool.engine_server import EngineSpec
from vime.pool.member import Member
from vime.pool.state import PoolState

if TYPE_CHECKING:
    from vime.pool.engine_slots import EngineSlots

logger = logging.getLogger(__name__)
_LOOK_S = 0.5
_FAULTS = (ValueError, RuntimeError, OSError, http.client.HTTPException)

Say = Callable[[str], None]
"""A function that gets a line for the user who waits."""


@dataclass
class Changes:
    """Changes the engines in `state`. After each change, it calls `notify` with the number of engines that take new
    requests."""

    state: PoolState
    notify: Callable[[int], None] = lambda count: None

    def add(self, count: int, say: Say) -> list[str]:
        """Starts `count` engines on free devices, and returns their names when they serve. Raises ValueError before a
        server starts if too few devices are free, and RuntimeError if a server does not serve."""
        return self._join(self._slots().take(count), say)

    def take_in(self, address: str, say: Say) -> list[str]:
        """Adds an external engine and returns its name. Raises ValueError if it cannot be used."""
        slots = self._slots()
        where = external.split(address, "--address")
        url = f"http://{where['host']}:{where['port']}"
        if any(member.control.url == url for member in self.state.members):
            raise ValueError(
                f"--address must be that of another engine, got {address}, which is in the run; "
                "start one at another address"
            )
        external.require_joinable(slots.config, url, trained=self.state.transfer.has_source)
        self._require_model(slots, url)
        return self._join([slots.add(where)], say)

    def remove(self, title: str, wait_s: float, say: Say) -> str:
        """Removes the engine with this name or address, and waits at most `wait_s` seconds for its requests. Returns a
        report for the user. Raises ValueError if the engine does not serve, or if no other engine serves."""
        slots = self._slots()
        with self.state.transfer.lock:
            member = self._find(title)
            others = self._count(member) - 1
            if not others:
                raise ValueError(
                    f"a run must keep one engine that serves, got {title}, the last one; add one first"
                )
            member.leaving = True
            self.state.leave_router(member)
            self.state.record(member, "leaving")
        if not member.is_prefill:
            self.notify(others)
        say(f"{member.title} gets no new requests")
        left = self._drain(member, wait_s)
        with self.state.transfer.lock:
            member.serving = False
            self.state.members.remove(member)
        member.stop()
        is_external = slots.is_external(member.spec.index)
        slots.give_back(member.spec.index)
        self.state.record(member, "removed")
        outcome = (
            "the external server keeps running"
            if is_external
            else "its server ended and its devices are free"
        )
        return f"{member.title} has left{left}; {outcome}"

    def has(self, title: str) -> bool:
        """Returns whether an engine of this pool has that name or address."""
        return any(_is(member, title) for member in self.state.members)

    def _count(self, member: Member) -> int:
        """Returns the number of engines that take requests and have the role of `member`."""
        members = self.state.members
        return sum(
            each.serving and not each.leaving and each.is_prefill == member.is_prefill for each in members
        )

    def _slots(self) -> EngineSlots:
        if self.state.slots is None:
            raise ValueError(
                "a pool must have device slots to change its engines, got none; report this as a bug"
            )
        return self.state.slots

    def _find(self, title: str) -> Member:
        for member in filter(lambda member: _is(member, title), self.state.members):
            if member.leaving:
                raise ValueError(
                    f"ENGINE must serve to be removed, got {title}, which leaves already; wait for it"
                )
            if not member.serving:
                raise ValueError(
                    f"ENGINE must serve to be removed, got {title}, which is starting; try again when it serves"
                )
            return member
        known = ", ".join(f"{member.title} at {member.control.url}" for member in self.state.members)
        raise ValueError(f"ENGINE must be one of {known}, got {title}; `vime engines list` shows them")

    def _drain(self, member: Member, wait_s: float) -> str:
        """Waits until the engine has no requests. Returns a text for the user about requests that remain, or an empty
        text."""
        end = time.monotonic() + wait_s
        quiet = 0
        while not self.state.stopping.is_set():
            try:
                load = member.control.load()
            except _FAULTS as error:
                logger.warning("engine %s did not answer while it left: %s", member.control.url, error)
                return ", without an answer; its requests begin again elsewhere"
            if load is None:
                return "; the engine does not report its requests, so they begin again on other engines"
            running = load.running + load.waiting
            quiet = 0 if running else quiet + 1
            if quiet == 2:  # a request may have been between router and engine
                return ""
            if time.monotonic() >= end:
                return f" after {wait_s:g} s; {running} requests begin again elsewhere"
            time.sleep(_LOOK_S)
        return ""

    def _require_model(self, slots: EngineSlots, url: str) -> None:
        checkpoint = slots.config.rollout.hf_checkpoint
        try:
            served = slots.control(url, slots.make_spec(0).run_key).model()
        except (*_FAULTS, KeyError) as error:
            raise ValueError(
                f"the engine at {url} must say which model it serves, got: {error}; start it with `vime serve engine`"
            ) from error
        if served != checkpoint and _settings(served) != _settings(checkpoint):
            raise ValueError(
                f"the engine at {url} must serve the model of this run, {checkpoint}, got {served}; start it with the "
                "flags of the run"
            )

    def _join(self, specs: Sequence[EngineSpec], say: Say) -> list[str]:
        """Starts the engines at the same time. Raises RuntimeError after all starts if an engine does not serve."""
        members = [self.state.make(spec) for spec in specs]
        with self.state.transfer.lock:
            for member in members:
                member.starting = True
            self.state.members.extend(members)
        with ThreadPoolExecutor(len(members)) as threads:
            failed = [
                text for text in threads.map(lambda member: self._bring_in(member, say), members) if text
            ]
        if failed:
            raise RuntimeError("; ".join(failed))
        return [member.title for member in members]

    def _bring_in(self, member: Member, say: Say) -> str | None:
        """Returns None when the engine serves. Otherwise removes the engine and returns the reason."""
        try:
            self.state.launch(member)
            if self.state.stopping.is_set():  # `stop` has not seen this server
                raise RuntimeError(
                    "an engine must join before its run ends, got a run that ends; add the engine after the run resumed"
                )
            assert member.handle is not None
            say(f"{member.title} starts at {member.control.url}; log: {member.spec.log_path}")
            member.handle.wait_ready()
            say(f"{member.title} gets the weights")
            self.state.transfer.join(member, lambda: self.state.admit(member))
        except Exception as error:  # the border of this engine's thread
            logger.warning("engine %s did not join: %s", member.title, error)
            with self.state.transfer.lock:
                member.serving = False
                self.state.members.remove(member)
            member.stop()
            self._slots().give_back(member.spec.index)
            self.state.record(member, "failed")
            return f"{member.title} did not join: {error}"
        finally:
            member.starting = False
        self.notify(self._count(member))
        say(f"{member.title} serves")
        return None


def _is(member: Member, title: str) -> bool:
    address = title.removeprefix("http://").rstrip("/")
    return title == member.title or f"http://{address}" == member.control.url


def _settings(checkpoint: str) -> object:
    """Returns the configuration of a checkpoint folder, or the folder's name if this host cannot read it."""
    try:
        return json.loads((Path(checkpoint) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return checkpoint
