"""Implements slime's EnginePool: the driver's handle on the engine servers of one backend behind one router.

The pool starts the servers, and its monitor thread replaces dead engines. slime.weight_sync.transfer moves weights and
puts engines to sleep. An engine that restarts loads the last published weights before the pool registers it with the
router. This module does not import Ray, because `spawn` makes the servers' handles. `Kind` has a backend's classes.
"""

from __future__ import annotations

import functools
import http.client
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from slime.protocols import RolloutEngine, WeightSource, WeightUpdate
from slime.roles.served import POLICY
from slime.tracking.events import Events
from vime.pool.changes import Changes
from vime.pool.control import PauseMode
from vime.pool.engine_server import EngineSpec, Standby
from vime.pool.health_watch import HealthWatch
from vime.pool.member import Member, Spawn
from vime.pool.process import Started, ended_how, require_running
from vime.pool.router import RouterSpec
from vime.pool.state import Kind, PoolState, each

if TYPE_CHECKING:
    from vime.pool.engine_slots import EngineSlots

logger = logging.getLogger(__name__)
_POLL_S = 0.25


class ServerPool:
    """An EnginePool of a subclass's servers. Call `launch` and `wait_ready` first. Every method is thread-safe.

    `pause_mode` decides what happens to running requests while weights change. With "keep" they continue afterwards on
    the new weights. With `flush_interval` N they compute their keys and values again at every Nth update.

    With `frees_memory`, `sleep` frees the device's memory (vLLM's level 2, which needs --enable-sleep-mode) and drops
    weights, keys and values. After `wake`, the engines wait for an update. No server starts while the others sleep.
    Without `frees_memory`, `sleep` only pauses the engines, because vLLM cannot free memory on CPUs.
    `source` is the trainer, or None for frozen weights. `dtype` is the engines' dtype, with which log-probs are
    compared. `max_restarts` limits the restarts of one engine between two weight updates, and 0 turns restarts off.
    """

    kind: Kind
    """The default of the class. `__init__` takes another one as an argument."""

    def __init__(
        self,
        specs: Sequence[EngineSpec],
        router: RouterSpec,
        *,
        spawn: Spawn | None = None,
        dtype: str = "",
        pause_mode: PauseMode = "keep",
        frees_memory: bool = False,
        flush_interval: int | None = 1,
        source: WeightSource | None = None,
        slots: EngineSlots | None = None,
        events: Events | None = None,
        model: str = POLICY,
        kind: Kind | None = None,
        max_restarts: int = 3,
        health_check_interval_s: float = 30.0,
        health_check_timeout_s: float = 30.0,
        health_check_first_wait_s: float = 0.0,
        standby_after_s: float = 0.0,
    ) -> None:
        if not specs:
            raise ValueError("an engine pool must have engines, got none; check --rollout-num-gpus")
        if kind is not None:
            self.kind = kind
        self.state = PoolState(
            kind=self.kind,
            router=self.kind.router(replace(router, checkpoint=specs[0].model_path)),
            spawn=self.kind.server if spawn is None else spawn,
            pause_mode=pause_mode,
            slots=slots,
            events=Events("engines", None) if events is None else events,
            model=model,
            patience_s=health_check_timeout_s,
            standby=Standby(standby_after_s),
        )
        self.state.follow(source, frees_memory=frees_memory, flush_interval=flush_interval)
        self.state.members.extend(map(self.state.make, specs))
        self._members, self._router, self._transfer = (
            self.state.members,
            self.state.router,
            self.state.transfer,
        )
        self._dtype = dtype
        self._max_restarts = max_restarts
        self._interval_s, self._timeout_s = health_check_interval_s, health_check_timeout_s
        self._first_wait_s = health_check_first_wait_s
        self._health_watch = HealthWatch(
            self._members,
            self.state.stopping,
            health_check_interval_s + health_check_timeout_s,
            self.state.record_load,
        )
        self._monitor = threading.Thread(target=self._watch, name="engine-monitor", daemon=True)
        self.changes = Changes(self.state)
        self.announce: Callable[[WeightUpdate], None] | None = None
        """Called with each version that the engines have loaded."""

    @property
    def router_url(self) -> str:
        return self._router.spec.url

    @property
    def engine_urls(self) -> list[str]:
        """Returns the URLs of the engines that serve at the moment."""
        return [member.control.url for member in self._members if member.serving]

    @property
    def facts(self) -> dict[str, object]:
        """Returns attributes for the `args` of hooks: the address of the router's gateway, and the engines' dtype.

        `own_servers` has the fields of slime.peers.http.OwnServers for the router and the gateway.
        """
        spec = self._router.spec
        headers = {"Authorization": f"Bearer {spec.run_key}"}
        return {
            **{f"{engine}_router_ip": spec.gateway_host for engine in ("vllm", "sglang")},
            **{f"{engine}_router_port": spec.gateway_port for engine in ("vllm", "sglang")},
            "vllm_router_headers": headers,
            "router_url": spec.gateway_url,
            "own_servers": [
                {
                    "urls": [spec.gateway_url, spec.url],
                    "headers": headers,
                    "workers": spec.url + self.kind.workers,
                    "worker_path": self.kind.worker_path(spec.run_key),
                    "held": not spec.external,
                }
            ],
            "rollout_engine_dtype": self._dtype,
        }

    def client(self) -> RolloutEngine:
        """Returns a picklable RolloutEngine that sends its requests to the router."""
        spec = self._router.spec
        return self.kind.client(spec.url, spec.run_key, held=not spec.external)

    def launch(self) -> None:
        """Starts the processes of the router and of all engines. Engines with `EngineSpec.waits` do not take their
        devices yet. Stops all processes before it raises, for example ValueError for a port in use."""
        with self._stopped_on_failure():
            self._router.start()
            for member in self._members:
                self.state.launch(member)

    def check_launched(self) -> None:
        """Raises an error with the last log lines if a process that `launch` started has ended."""
        started: list[Started] = [self._router]
        started += [member.handle for member in self._members if member.handle]
        require_running(started)

    def wait_ready(self) -> None:
        """Lets the engines take their devices, and returns when they serve. Stops all processes before it raises, for
        example RuntimeError for an engine that does not serve."""
        with self._stopped_on_failure():
            each(self._members, _open_gate)
            self._router.wait_ready()
            # The servers start at the same time. This thread waits for each in turn, so that Ctrl-C ends the wait.
            for member in self._members:
                self._wait_ready(member)
                if member.spec.starts_empty:
                    self._transfer.hold(member)
                self.state.admit(member)
        self._monitor.start()
        self._health_watch.start()

    def start(self) -> None:
        """Calls `launch` and `wait_ready`, for callers that start nothing else in between."""
        self.launch()
        self.wait_ready()

    @contextmanager
    def _stopped_on_failure(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.stop()
            raise

    def publish(self, version: int) -> Mapping[str, float]:
        """Loads the trainer's weights as `version` on every serving engine, and returns the update's metrics.

        slime.weight_sync.transfer describes the steps. The monitor restarts an engine that dies meanwhile. Raises
        ControlError if an engine refuses the weights, or has other weights afterwards (--check-weight-update-equal).
        """
        with self._transfer.lock:
            self._transfer.publish(version)
            titles = [member.title for member in self.state.serving_members()]
            self.state.events.add("weights", model=self.state.model, engines=titles, version=version)
            self.allow_restarts()
            if self.announce is not None:
                self.announce(self._transfer.last)
            return self._transfer.figures

    def allow_restarts(self) -> None:
        """Resets each engine's number of restarts. For a frozen model too, the limit is per update of the policy."""
        for member in self.state.serving_members():
            member.restarts = 0

    def sleep(self) -> None:
        """Pauses the engines for the trainer. With `frees_memory`, they also free their devices' memory."""
        self._transfer.sleep()

    def wake(self) -> bool:
        """Undoes `sleep`. Returns True if the engines have dropped their weights, so they serve after the next
        update."""
        return self._transfer.wake()

    def check_health(self) -> None:
        """Raises RuntimeError with the last log lines if an engine or the router cannot be restarted."""
        self.state.check_health()

    def stop(self) -> None:
        """Ends all processes that were started. A second call does nothing."""
        self.state.stopping.set()
        self._stop_servers()
        while self._monitor.is_alive():  # it may be starting a server just now
            self._monitor.join(timeout=1)
            self._stop_servers()

    def _stop_servers(self) -> None:
        self.state.standby.stop()
        each(self._members, Member.stop)
        self._router.stop()

    def _wait_ready(self, member: Member) -> None:
        assert member.handle is not None
        member.handle.wait_ready()
        member.last_health_check = time.monotonic() + self._first_wait_s

    def _watch(self) -> None:
        """Runs the monitor thread. It restarts dead servers until the pool stops or a server cannot be restarted."""
        try:
            while not self.state.stopping.wait(_POLL_S):
                if self._router.poll() is not None:
                    self._restart_router()
                for member in [*self._members]:
                    if member.starting or member.leaving:  # `changes` supervises it
                        continue
                    if not self._transfer.is_trainers_turn and self._is_due_and_dead(member):
                        self._restart(member)
                self.state.keep_standby()
        except Exception as error:  # the border of this thread: check_health raises the error in the driver
            if not self.state.stopping.is_set():
                self.state.lost = f"{type(error).__name__}: {error}"
                logger.exception("an engine is lost")

    def _is_due_and_dead(self, member: Member) -> bool:
        assert member.handle is not None
        if member.doomed or member.handle.poll() is not None:
            return True
        now = time.monotonic()
        if now - member.last_health_check < self._interval_s:
            return False
        member.last_health_check = now
        return not member.control.is_healthy(self._timeout_s)

    def _restart(self, member: Member) -> None:
        """Replaces a dead server. A replacement that dies before it serves counts as the next death."""
        while not self.state.stopping.is_set():
            assert member.handle is not None
            how = ended_how(member.handle.poll()) or "it did not answer"
            tail = self._take_out(member)
            if tail is None:
                return
            member.restarts += 1
            if member.restarts > self._max_restarts:
                raise RuntimeError(
                    f"engine {member.control.url} died and was restarted {self._max_restarts} times since the last "
                    f"weight update, which is the limit ({how}); its last log lines:\n{tail}"
                )
            logger.warning(
                "engine %s died and is restarted (%s); its last log lines:\n%s", member.control.url, how, tail
            )
            try:
                self._bring_back(member)
            except (RuntimeError, OSError, http.client.HTTPException) as error:
                if (
                    self._transfer.is_trainers_turn
                ):  # `sleep` has ended it, which is no death; `_watch` starts it later
                    member.doomed, member.restarts = True, member.restarts - 1
                    return
                logger.warning("the replacement of engine %s failed: %s", member.control.url, error)
            else:
                logger.warning("engine %s serves again", member.control.url)
                return

    def _take_out(self, member: Member) -> str | None:
        """Removes the engine from the router, ends its process, and returns the last lines of its log. Returns None if
        the engine is leaving the run."""
        assert member.handle is not None
        with self._transfer.lock:
            if member.leaving:
                return None
            member.serving = False
            self.state.record(member, "dead")
            try:
                self.state.leave_router(member)
            except (RuntimeError, OSError, http.client.HTTPException) as error:
                logger.warning("the router keeps engine %s on its list: %s", member.control.url, error)
        tail = member.handle.tail_log()
        member.handle.stop()
        return tail

    def _bring_back(self, member: Member) -> None:
        """Starts a new server on a new port, and registers it with the router once it has loaded the last weights."""
        member.spec = replace(member.spec, port=0)
        try:
            with self._transfer.lock:
                if self._transfer.is_trainers_turn:
                    raise RuntimeError("no engine may start while the trainer has the memory")
                member.starting = True
                self.state.launch(member)
            self._wait_ready(member)
            self._transfer.join(member, functools.partial(self.state.admit, member))
        finally:
            member.starting = False

    def _restart_router(self) -> None:
        how, lines = ended_how(self._router.poll()), self._router.tail_log()
        logger.warning("the router died and is restarted (%s); its last log lines:\n%s", how, lines)
        with self._transfer.lock:
            self._router.stop()
            self._router.start()
            self._router.wait_ready()
            for member in self.state.serving_members():
                if not member.leaving and not member.is_prefill:
                    self._router.add(member.control.url)


def _open_gate(member: Member) -> None:
    assert member.handle is not None
    member.handle.open_gate()
