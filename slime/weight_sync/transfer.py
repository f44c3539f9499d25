"""The state machine that moves new weights to the running engines. The engine pool drives it.

    SERVING ---publish---> PAUSED ------> LOADING ------> FINISHING ------> SERVING
    SERVING ---sleep-----> ASLEEP --wake--> SERVING                           engines kept their weights
                           ASLEEP --wake--> EMPTY                             engines dropped their weights
    EMPTY, PAUSED --sleep--> ASLEEP --wake--> EMPTY, PAUSED                    the trainer was lost in an update
    EMPTY -----publish-------------------> LOADING ------> FINISHING ------> SERVING

Engines answer requests only in the state SERVING. Engines that start without weights begin as PAUSED (see `hold`).
A failed update leaves engines PAUSED, or EMPTY if they were EMPTY. So no engine serves old, made-up or partly loaded
weights. The pool restarts an engine that dies during an update. The engine serves when `join` has loaded the last
weights into it. This module owns the steps' order and lock. It calls channels (slime.weight_sync.registry) only through
`WeightChannel`, and engines through the protocols below.
"""

from __future__ import annotations

import enum
import functools
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import ExitStack
from typing import TYPE_CHECKING, Protocol

from slime.protocols import WeightSource, WeightUpdate
from slime.system.waiting import wait
from slime.tracking.timers import Timers
from slime.weight_sync.cache_flush import should_flush_cache
from slime.weight_sync.delta.refusals import refusals
from slime.weight_sync.registry import CHANNELS

if TYPE_CHECKING:
    from slime.weight_sync.channel import WeightChannel

logger = logging.getLogger(__name__)
_BYTES, _DENSITY = "perf/update_weights_wire_bytes", "perf/update_weights_density"


class State(enum.Enum):
    """The state of the engines in a pool. All engines have the same state."""

    SERVING = "they answer requests"
    PAUSED = "they keep their requests and do not compute"
    LOADING = "they load the parts of an update"
    FINISHING = "they have all parts, and make them their weights"
    ASLEEP = "the trainer has their devices"
    EMPTY = "they have memory for weights again, and no weights"


class Loader(Protocol):
    """The calls of an engine server that an update needs. A call raises when the server fails or is unreachable."""

    def start_weight_update(self) -> None: ...

    def update_weights(self, message: dict[str, object]) -> None:
        """Loads one part, see `WeightUpdate.message`."""
        ...

    def finish_weight_update(self, version: int) -> None:
        """Switches the engine to the loaded weights, with the number `version`."""
        ...

    def reset_prefix_cache(self) -> None:
        """Drops keys and values that were computed with the previous weights."""
        ...


class Engine(Loader, Protocol):
    """One engine of a pool. `name` changes when its server restarts; `workers` is the number of its workers."""

    @property
    def name(self) -> str: ...

    @property
    def workers(self) -> int: ...

    @property
    def is_prefill(self) -> bool:
        """Returns whether the engine computes prompts for other engines."""
        ...

    def pause(self, drops_cache: bool) -> None:
        """Freezes the running requests. Without `drops_cache`, the engine keeps all keys and values."""
        ...

    def resume(self) -> None: ...

    def free_memory(self) -> None:
        """Frees the device's memory: weights, keys and values are dropped."""
        ...

    def take_weight_memory(self) -> None: ...

    def take_cache_memory(self) -> None: ...


class UpdatedEngines(Protocol):
    """The methods of the engine pool that the transfer calls, with the transfer's lock held."""

    def serving(self) -> list[Engine]:
        """Returns the engines that take part at the moment."""
        ...

    def on_serving(self, act: Callable[[Engine], None]) -> None:
        """Calls `act` on all engines at the same time. An engine that dies meanwhile no longer takes part; any other
        failure is raised."""
        ...

    def stop_starting(self) -> None:
        """Stops engines that are starting. They start again after the wake-up."""
        ...

    def check_health(self) -> None:
        """Raises RuntimeError when an engine is permanently lost."""
        ...


def find_channel(part: WeightUpdate) -> type[WeightChannel]:
    """Returns the channel class of a part. The driver needs it only for a collective channel and after a fault (imports
    torch)."""
    return CHANNELS[part.channel].load()


def load_part(engine: Loader, part: WeightUpdate) -> None:
    """Makes an engine load a part. If this fails, every process that waits for the engine in the channel is
    released."""
    with ExitStack() as on_failure:
        on_failure.callback(lambda: find_channel(part).give_up(part.info))
        engine.update_weights(part.message())
        on_failure.pop_all()


def finish(engine: Loader, version: int, *, drops_cache: bool = True) -> None:
    """Ends an update on one engine."""
    engine.finish_weight_update(version)
    if drops_cache:
        engine.reset_prefix_cache()


def load(engine: Loader, update: WeightUpdate) -> None:
    """Makes an engine, paused or idle, load a whole update."""
    engine.start_weight_update()
    load_part(engine, update)
    finish(engine, update.version)


class WeightTransfer:
    """The state of a pool's engines, and every step that changes it. Thread-safe: `lock` is held during each step.

    `frees_memory`: sleeping engines free their devices' memory. Otherwise they only pause. `source` is the trainer;
    None if nothing is trained. `flush_interval` is the number of updates between two that drop the engines' caches
    (`should_flush_cache`; None: only the first update drops them). `on_loaded` is called for each part that all engines
    have loaded, with the part's index in the update and the seconds that the engines needed.
    """

    def __init__(
        self,
        pool: UpdatedEngines,
        source: WeightSource | None,
        *,
        frees_memory: bool,
        flush_interval: int | None = 1,
        on_loaded: Callable[[WeightUpdate, int, float], None] = lambda part, index, seconds: None,
    ) -> None:
        self._pool, self._source, self._frees_memory, self._on_loaded = pool, source, frees_memory, on_loaded
        self._flush_interval, self._updates = flush_interval, 0
        self.lock = threading.RLock()
        self.state = State.SERVING
        self._is_unfinished = False
        """True if an update had failed before the engines went to sleep."""
        self._last: WeightUpdate | None = None
        self._timers = Timers()
        self.figures: Mapping[str, float] = {}
        """Metrics of the last update: bytes that one engine got, `WeightUpdate.density`, and four times in seconds. In
        these times the driver waited for the trainer, paused the engines, had them load the parts, and had them serve
        again."""

    @property
    def version(self) -> int | None:
        """Returns the version of the last published weights, or None before the first update."""
        return None if self._last is None else self._last.version

    @property
    def last(self) -> WeightUpdate:
        """Returns the last published weights. Raises AssertionError before the first update."""
        assert self._last is not None
        return self._last

    @property
    def has_source(self) -> bool:
        """Returns whether these engines receive a trainer's weights."""
        return self._source is not None

    @property
    def is_trainers_turn(self) -> bool:
        """Returns whether the trainer has the devices' memory. An engine that starts during this time would not find
        enough memory."""
        return self.state is State.ASLEEP and self._frees_memory

    def publish(self, version: int) -> None:
        """Sends the trainer's weights to all engines that take part. Version v holds the weights after v rollouts."""
        with self.lock:  # no engine joins during the update: every engine in it gets all parts
            if self.state is State.ASLEEP:
                raise RuntimeError(
                    "weights must be published to engines that are awake, got sleeping ones; wake them"
                )
            empty = self.state is State.EMPTY
            drops_cache = should_flush_cache(self._flush_interval or 0, self._updates + 1)
            self._timers.flush()  # figures that a failed update has left
            try:
                self._load_everywhere(version, drops_cache)
                self.state = State.FINISHING
                with self._timers.measure("update_weights_finish"):
                    self._pool.on_serving(lambda engine: finish(engine, version, drops_cache=drops_cache))
                    if empty:
                        self._pool.on_serving(lambda engine: engine.take_cache_memory())
                    self._pool.on_serving(lambda engine: engine.resume())
                self.state = State.SERVING
                self._updates += 1
                self.figures = {**self.figures, **self._timers.flush()}
            finally:
                if self.state is not State.SERVING:
                    self.state = State.EMPTY if empty else State.PAUSED

    def hold(self, engine: Engine) -> None:
        """Pauses an engine that has started without weights. Requests that it gets wait for the first update."""
        with self.lock:
            engine.pause(True)
            self.state = State.PAUSED

    def sleep(self) -> None:
        """Gives the devices to the trainer."""
        with self.lock:
            if (
                self.state is State.EMPTY
            ):  # after a failed update; only an engine with all its memory can free it
                self._pool.on_serving(lambda engine: engine.take_cache_memory())
            self._is_unfinished = self.state is State.PAUSED
            self.state = State.ASLEEP
            if self._frees_memory:
                self._pool.stop_starting()
                self._pool.on_serving(lambda engine: engine.free_memory())
            else:
                self._pause(self._flush_interval == 1)

    def wake(self) -> bool:
        """Takes the devices back. Returns True if the engines have no weights, or those of an unfinished update. They
        serve after the next update."""
        with self.lock:
            self.state = State.EMPTY if self._frees_memory else State.SERVING
            if self._frees_memory:
                self._pool.on_serving(lambda engine: engine.take_weight_memory())
            elif self._is_unfinished:
                self.state = State.PAUSED
            else:
                self._pool.on_serving(lambda engine: engine.resume())
            return self.state is not State.SERVING

    def join(self, engine: Engine, admit: Callable[[], None]) -> None:
        """Loads the last weights and the pool's state into a new server, then calls `admit`, after which it takes
        part."""
        while True:
            last = self._last
            # Outside the lock: the trainer may be busy.
            update = self._in_a_file(last)
            with self.lock:
                if self._last is not last:
                    continue  # another version was published meanwhile
                if update is not None:
                    load(engine, update)
                if self.state is State.ASLEEP:
                    self._put_to_sleep(engine)
                elif last is None and self.state is State.PAUSED:
                    self.hold(engine)
                return admit()

    def _in_a_file(self, last: WeightUpdate | None) -> WeightUpdate | None:
        """Returns the weights for an engine that did not receive update `last`: that update, or the trainer's weights
        in a file if the update's parts are gone."""
        if last is None or last.lasting or self._source is None:
            return last
        return self._source.weights_file().result()

    def _pause(self, drops_cache: bool) -> None:
        """Pauses all engines. Prefill engines come last, because a decode engine first ends its transfers from them."""
        last = [engine for engine in self._pool.serving() if engine.is_prefill]
        self._pool.on_serving(lambda engine: None if engine in last else engine.pause(drops_cache))
        if last:
            self._pool.on_serving(lambda engine: engine.pause(drops_cache) if engine in last else None)

    def _put_to_sleep(self, engine: Engine) -> None:
        if self._frees_memory:
            engine.free_memory()
        else:
            engine.pause(self._flush_interval == 1)

    def _load_everywhere(self, version: int, drops_cache: bool) -> None:
        """Loads all parts. If engines that receive a part together lose an engine, the others begin again. All engines
        begin again if one refuses a delta: the trainer then sends the whole set."""
        takers = self._pool.serving()
        parts = self._parts(version, takers)
        self._last = first = next(parts)
        with self._timers.measure("update_weights_pause"):
            if self.state is not State.EMPTY:
                self.state = State.PAUSED
                self._pause(drops_cache)
            self.state = State.LOADING
            self._pool.on_serving(lambda engine: engine.start_weight_update())
        part: WeightUpdate | None = first
        index = 0
        while part is not None:
            began = time.perf_counter()
            if self._reaches_all(part, takers):
                self._on_loaded(part, index, time.perf_counter() - began)
                self._count(part, index)
                refused, part, index = refusals(part), next(parts, None), index + 1
                if not refused:
                    continue
                assert part is None, "engines judge a delta when they have all of it"
                why = f"the whole set of weights is sent instead of a delta: {'; '.join(refused)}"
            elif self._pool.serving() == takers:
                next(parts, None)  # raises the trainer's error, if the trainer failed
                raise RuntimeError(
                    "a broadcast of weights must reach all engines, got a broken connection while all run; see the "
                    "logs of trainer-0 and the engines, or take --update-weight-transport disk"
                )
            else:
                left = len(self._pool.serving())
                why = f"an engine died: the update begins again for the {left} that are left"
            logger.warning("%s", why)
            takers = self._pool.serving()
            parts = self._parts(version, takers)
            self._last = part = next(parts)
            index = 0

    def _count(self, part: WeightUpdate, index: int) -> None:
        before = self.figures[_BYTES] if index else 0
        self.figures = {_BYTES: before + (part.size_bytes or 0), _DENSITY: part.density}

    def _reaches_all(self, part: WeightUpdate, takers: list[Engine]) -> bool:
        """Makes the engines load a part. Returns False if they must receive it together and some of `takers` do not
        have it."""
        collective = CHANNELS[part.channel].collective
        if not collective or self._pool.serving() == takers:
            with self._timers.measure("update_weights_load"):
                self._pool.on_serving(lambda engine: load_part(engine, part))
        if not collective:
            return True
        channel = find_channel(part)
        if self._pool.serving() == takers and not channel.is_abandoned(part.info):
            return True
        channel.give_up(part.info)
        return False

    def _parts(self, version: int, takers: list[Engine]) -> Iterator[WeightUpdate]:
        """Yields the parts of the weights in order. The trainer makes the next part while engines load the previous
        part."""
        assert self._source is not None, "a pool without a trainer has no weights to publish"
        receivers = {engine.name: engine.workers for engine in takers}
        coming = self._source.next_weights(version, receivers)
        while (part := self._came(coming)) is not None:
            coming = self._source.next_weights(version, receivers)
            coming.add_done_callback(functools.partial(_release_engines, part))
            yield part

    def _came(self, coming: Future[WeightUpdate | None]) -> WeightUpdate | None:
        with self._timers.measure("update_weights_wait"):
            return wait(coming, self._pool.check_health)


def _release_engines(part: WeightUpdate, sent: Future[WeightUpdate | None]) -> None:
    """Releases engines that wait for a failed trainer. This callback runs when the trainer's sending ends."""
    if not sent.cancelled() and sent.exception() is not None:
        find_channel(part).give_up(part.info)
