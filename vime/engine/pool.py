"""The running engines behind one router, as the driver sees them: slime's EnginePool over vLLM.

Owns start-up, weight updates to all engines, and the thread that brings dead engines back: an engine that restarts
gets the last published weights before the router may send it anything. Ray stays outside: `spawn` makes the handles.
"""

from __future__ import annotations

import functools
import http.client
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Protocol, TypeVar

from slime.protocols import WeightUpdate
from slime.weight_sync.group import give_up, is_given_up
from vime.engine.client import VllmEngineClient
from vime.engine.control import ControlError, EngineControl, PauseMode
from vime.engine.plugin import ENGINE_VARIABLE
from vime.engine.process import require_running
from vime.engine.router import Router, RouterSpec
from vime.engine.server import EngineServer, EngineSpec
from vime.engine.updates import finish, load, load_part

logger = logging.getLogger(__name__)
T = TypeVar("T")
_POLL_S = 0.25


class EngineHandle(Protocol):
    """What the pool needs of an engine server, wherever it runs (EngineServer, RayEngineServer)."""

    def start(self) -> str: ...
    def open_gate(self) -> None: ...
    def wait_ready(self) -> None: ...
    def poll(self) -> int | None: ...
    def tail_log(self) -> str: ...
    def stop(self) -> None: ...


class _Engine:
    """One place in the pool: the spec stays, the server behind it may be replaced."""

    def __init__(self, spec: EngineSpec, place: int) -> None:
        self.spec = spec
        self.place = place
        self.starts = 0
        self.handle: EngineHandle | None = None
        self.control = EngineControl("", spec.run_key)
        self.serving = False
        self.starting = False
        self.doomed = False  # a control call failed on it: it must be replaced even if it answers again
        self.restarts = 0
        self.last_health_check = time.monotonic()

    @property
    def name(self) -> str:
        """Of the server that is in this place now."""
        return f"engine-{self.place}-{self.starts}"


class VllmEnginePool:
    """EnginePool over vLLM servers. `start()` first; every method may be called from the driver's threads.

    `pause_mode`: what happens to running requests while weights change (keep: they go on afterwards on the new
    weights, with their keys and values computed anew). `gives_memory`: `sleep()` frees the device's memory (vLLM's
    level 2, needs --enable-sleep-mode): weights, keys and values are dropped, after `wake()` the engine waits for an
    update, and no server starts while the others sleep. Otherwise it only pauses, which is all that vLLM can do on CPU.
    `weights_file` is asked for the trainer's weights when an engine restarts and the last update was not a lasting one.
    `max_restarts` bounds the restarts of one engine between two weight updates; 0 turns restarting off.
    """

    def __init__(
        self,
        specs: Sequence[EngineSpec],
        router: RouterSpec,
        *,
        spawn: Callable[[EngineSpec], EngineHandle] = EngineServer,
        pause_mode: PauseMode = "keep",
        gives_memory: bool = False,
        weights_file: Callable[[], WeightUpdate] | None = None,
        max_restarts: int = 3,
        health_check_interval_s: float = 30.0,
        health_check_timeout_s: float = 30.0,
        health_check_first_wait_s: float = 0.0,
    ) -> None:
        if not specs:
            raise ValueError("an engine pool must have engines, got none; check --rollout-num-gpus")
        self._engines = [_Engine(spec, place) for place, spec in enumerate(specs)]
        self._router = Router(router)
        self._spawn = spawn
        self._pause_mode: PauseMode = pause_mode
        self._gives_memory = gives_memory
        self._max_restarts = max_restarts
        self._interval_s, self._timeout_s = health_check_interval_s, health_check_timeout_s
        self._first_wait_s = health_check_first_wait_s
        self._weights_file = weights_file
        self._lock = threading.RLock()  # membership, the last update, asleep or not
        self._last_update: WeightUpdate | None = None
        self._asleep = False
        self._empty = False  # awake again, but without weights
        self._lost: str | None = None
        self._stopping = threading.Event()
        self._monitor = threading.Thread(target=self._watch, name="engine-monitor", daemon=True)

    @property
    def router_url(self) -> str:
        return self._router.spec.url

    @property
    def engine_urls(self) -> list[str]:
        """The engines that serve at the moment."""
        return [engine.control.url for engine in self._engines if engine.serving]

    def client(self) -> VllmEngineClient:
        """A RolloutEngine that talks to the router; picklable."""
        return VllmEngineClient(self.router_url, self._router.spec.run_key)

    def start(self, meanwhile: Callable[[Callable[[], None]], object] | None = None) -> None:
        """Start the router and all engines; returns when they serve. `meanwhile` is called once their processes run,
        and before those that wait (`EngineSpec.waits`) take their devices. It gets a function to call now and then,
        which raises when one of them has ended.

        On any failure everything is stopped and the failure raised: ValueError (port taken), RuntimeError with the
        last log lines (never healthy).
        """
        try:
            self._router.start()
            for engine in self._engines:
                self._launch(engine)
            if meanwhile is not None:
                started = [self._router, *(engine.handle for engine in self._engines if engine.handle)]
                meanwhile(functools.partial(require_running, started))
            self._each(self._engines, lambda engine: engine.handle and engine.handle.open_gate())
            self._router.wait_ready()
            # One after the other and in this thread, so that Ctrl-C ends the wait; the servers start side by side.
            for engine in self._engines:
                self._wait_ready(engine)
                self._router.add(engine.control.url)
                engine.serving = True
        except BaseException:
            self.stop()
            raise
        self._monitor.start()

    def update_weights(self, parts: Callable[[dict[str, int]], Iterator[WeightUpdate]]) -> None:
        """Load the parts of one version on every serving engine, generation paused from the first to the last.

        An engine that dies meanwhile is left to the monitor, and a broadcast begins again for the others; one that
        refuses the weights, or holds others afterwards (--check-weight-update-equal), raises ControlError.
        """
        with self._lock:  # nobody joins from here on: those that are told of now get all parts
            told = self._serving()
            coming = parts(_workers(told))
            self._last_update = first = next(coming)
            if not self._empty:
                self._on_serving(lambda control: control.pause(self._pause_mode))
            self._on_serving(lambda control: control.start_weight_update())
            part: WeightUpdate | None = first
            while part is not None:
                if self._take(part, told):
                    part = next(coming, None)
                    continue
                if self._serving() == told:
                    next(coming, None)  # raises what has happened to the trainer, if that is it
                    raise RuntimeError(
                        "a broadcast of weights must reach all engines, got a broken connection while all run; see the "
                        "logs of trainer-0 and the engines, or take --update-weight-transport disk"
                    )
                told = self._serving()
                logger.warning("an engine died: the update begins again for the %d that are left", len(told))
                coming = parts(_workers(told))
                self._last_update = part = next(coming)
            self._on_serving(functools.partial(finish, version=first.version))
            if not self._asleep:
                if self._empty:
                    self._on_serving(lambda control: control.wake(["kv_cache"]))
                self._on_serving(lambda control: control.resume())
                self._empty = False
            for engine in self._serving():
                engine.restarts = 0

    def _take(self, part: WeightUpdate, told: list[_Engine]) -> bool:
        """Have the engines load a part. False when those that were `told` take it together, and not all have it."""
        group = part.info.get("group")
        if group is None or self._serving() == told:
            self._on_serving(functools.partial(load_part, part=part))
        if group is None or (self._serving() == told and not is_given_up(group)):
            return True
        give_up(group)
        return False

    def sleep(self) -> None:
        """Give the machine to the trainer: engines stop computing and, with `gives_memory`, free the device's."""
        with self._lock:
            self._asleep = True
            if self._gives_memory:  # one that is starting has it too; it starts anew after the wake-up
                starting = [engine for engine in self._engines if engine.starting]
                self._each(starting, lambda engine: engine.handle.stop() if engine.handle else None)
            self._each(self._serving(), self._unless_dead(self._put_to_sleep))

    def wake(self) -> bool:
        """Undo `sleep`. True: the weights were dropped, and engines serve again once an update has brought some."""
        with self._lock:
            self._asleep = False
            self._empty = self._gives_memory
            self._each(self._serving(), self._unless_dead(self._wake))
            return self._empty

    def check_health(self) -> None:
        """RuntimeError, with its last log lines, when an engine or the router is lost for good."""
        if self._lost is not None:
            raise RuntimeError(self._lost)

    def stop(self) -> None:
        """End everything that was started. May be called again."""
        self._stopping.set()
        self._stop_servers()
        while self._monitor.is_alive():  # it may be starting a server just now
            self._monitor.join(timeout=1)
            self._stop_servers()

    def _stop_servers(self) -> None:
        self._each(self._engines, lambda engine: engine.handle.stop() if engine.handle else None)
        self._router.stop()

    def _serving(self) -> list[_Engine]:
        return [engine for engine in self._engines if engine.serving]

    def _launch(self, engine: _Engine) -> None:
        engine.starts += 1
        env = {**engine.spec.env, ENGINE_VARIABLE: engine.name}
        waits = engine.spec.waits and engine.starts == 1
        engine.handle = self._spawn(replace(engine.spec, env=env, waits=waits))
        engine.control = EngineControl(engine.handle.start(), engine.spec.run_key)

    def _wait_ready(self, engine: _Engine) -> None:
        assert engine.handle is not None
        engine.handle.wait_ready()
        engine.last_health_check = time.monotonic() + self._first_wait_s

    def _put_to_sleep(self, engine: _Engine) -> None:
        if self._gives_memory:
            engine.control.sleep(2, "wait")  # it drops the keys and values of running requests
        else:
            engine.control.pause(self._pause_mode)

    def _wake(self, engine: _Engine) -> None:
        if self._gives_memory:
            engine.control.wake(["weights"])
        else:
            engine.control.resume()

    def _on_serving(self, act: Callable[[EngineControl], None]) -> None:
        self._each(self._serving(), self._unless_dead(lambda engine: act(engine.control)))

    def _unless_dead(self, act: Callable[[_Engine], None]) -> Callable[[_Engine], None]:
        """`act`, but an engine that no longer runs or answers is given up: the monitor replaces it.

        For good, even if it answers later: nobody knows how much of the call it has done.
        """

        def acted(engine: _Engine) -> None:
            try:
                act(engine)
            except (ControlError, OSError, http.client.HTTPException):
                if self._is_alive(engine):
                    raise
                engine.serving, engine.doomed = False, True
                logger.warning("engine %s died during a control call", engine.control.url)

        return acted

    def _is_alive(self, engine: _Engine) -> bool:
        assert engine.handle is not None
        return engine.handle.poll() is None and engine.control.is_healthy(self._timeout_s)

    def _watch(self) -> None:
        """The monitor thread: restarts what died, until the pool stops or something is lost for good."""
        try:
            while not self._stopping.wait(_POLL_S):
                if self._router.poll() is not None:
                    self._restart_router()
                for engine in self._engines:
                    if not self._is_trainers_turn and self._is_due_and_dead(engine):
                        self._restart(engine)
        except Exception as error:  # the border of this thread: the driver sees it at check_health
            if not self._stopping.is_set():
                self._lost = f"{type(error).__name__}: {error}"
                logger.exception("an engine is lost")

    @property
    def _is_trainers_turn(self) -> bool:
        """Whether the device's memory is the trainer's: a server that starts now would not find its share."""
        return self._asleep and self._gives_memory

    def _is_due_and_dead(self, engine: _Engine) -> bool:
        assert engine.handle is not None
        if engine.doomed or engine.handle.poll() is not None:
            return True
        now = time.monotonic()
        if now - engine.last_health_check < self._interval_s:
            return False
        engine.last_health_check = now
        return not engine.control.is_healthy(self._timeout_s)

    def _restart(self, engine: _Engine) -> None:
        """Replace a dead server; a replacement that dies before it serves counts as the next death."""
        while not self._stopping.is_set():
            tail = self._take_out(engine)
            engine.restarts += 1
            if engine.restarts > self._max_restarts:
                raise RuntimeError(
                    f"engine {engine.control.url} died and was restarted {self._max_restarts} times since the last "
                    f"weight update, which is the limit; its last log lines:\n{tail}"
                )
            logger.warning(
                "engine %s died and is restarted; its last log lines:\n%s", engine.control.url, tail
            )
            try:
                self._bring_back(engine)
            except (RuntimeError, OSError, http.client.HTTPException) as error:
                if self._is_trainers_turn:  # ended by `sleep`, and no death; `_watch` comes back to it
                    engine.doomed, engine.restarts = True, engine.restarts - 1
                    return
                logger.warning("the replacement of engine %s failed: %s", engine.control.url, error)
            else:
                logger.warning("engine %s serves again", engine.control.url)
                return

    def _take_out(self, engine: _Engine) -> str:
        """Out of the router, process ended; the last lines of its log."""
        assert engine.handle is not None
        with self._lock:
            engine.serving = False
            try:
                self._router.remove(engine.control.url)
            except (RuntimeError, OSError, http.client.HTTPException) as error:
                logger.warning("the router keeps engine %s on its list: %s", engine.control.url, error)
        tail = engine.handle.tail_log()
        engine.handle.stop()
        return tail

    def _bring_back(self, engine: _Engine) -> None:
        """A new server on a fresh port gets the last weights, and only then does the router hear of it."""
        engine.spec = replace(engine.spec, port=0)
        try:
            with self._lock:
                if self._is_trainers_turn:
                    raise RuntimeError("no engine may start while the trainer has the memory")
                engine.starting = True
                self._launch(engine)
            self._wait_ready(engine)
            self._join(engine)
        finally:
            engine.starting = False

    def _join(self, engine: _Engine) -> None:
        """Give a new server the last weights, and tell the router of it."""
        while not engine.serving:
            last = self._last_update
            passing = last is not None and not last.lasting
            # The trainer's own, where the last update is gone. It may have to be waited for: not with the lock.
            update = self._weights_file() if passing and self._weights_file is not None else last
            with self._lock:
                if self._last_update is not last:
                    continue  # another went by meanwhile
                if update is not None:
                    load(engine.control, update)
                if self._asleep:
                    self._put_to_sleep(engine)
                self._router.add(engine.control.url)
                engine.doomed, engine.serving = False, True

    def _restart_router(self) -> None:
        logger.warning("the router died and is restarted; its last log lines:\n%s", self._router.tail_log())
        with self._lock:
            self._router.stop()
            self._router.start()
            self._router.wait_ready()
            for engine in self._serving():
                self._router.add(engine.control.url)

    @staticmethod
    def _each(engines: Sequence[_Engine], act: Callable[[_Engine], T]) -> list[T]:
        """`act` on all engines at the same time; raises the first failure when all are done."""
        if not engines:
            return []
        with ThreadPoolExecutor(len(engines)) as threads:
            return list(threads.map(act, engines))


def _workers(engines: Sequence[_Engine]) -> dict[str, int]:
    return {engine.name: engine.spec.tensor_parallel_size for engine in engines}
