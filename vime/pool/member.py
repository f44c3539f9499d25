"""One entry of the engine pool. It has the engine's present server and the control calls to it."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from slime.weight_sync.variables import ENGINE_VARIABLE
from vime.pool.control import MakeControl, PauseMode
from vime.pool.engine_server import EngineSpec


class EngineHandle(Protocol):
    """The methods of an engine server that the pool calls (EngineServer here, RayEngineServer on another node)."""

    def start(self) -> str: ...
    def open_gate(self) -> None: ...
    def wait_ready(self) -> None: ...
    def poll(self) -> int | None: ...
    def whereabouts(self) -> tuple[str, bool]: ...
    def tail_log(self) -> str: ...
    def stop(self) -> None: ...


class Spawn(Protocol):
    """Makes a server that is not started yet."""

    def __call__(self, spec: EngineSpec, /) -> EngineHandle: ...


class Member:
    """A `slime.weight_sync.transfer.Engine`. The spec stays when the server is replaced."""

    def __init__(self, spec: EngineSpec, index: int, pause_mode: PauseMode, control: MakeControl) -> None:
        self.spec = spec
        self.index = index
        self.starts = 0
        self.handle: EngineHandle | None = None
        self._control = control
        self.control = control("", spec.run_key)
        self.serving = False
        self.starting = False
        self.leaving = (
            False  # a leaving engine gets no new requests, takes part in updates, and is not replaced
        )
        self.doomed = False  # a control call failed: the server is replaced even if it answers again
        self.restarts = 0
        self.last_health_check = time.monotonic()
        self._pause_mode: PauseMode = pause_mode

    @property
    def name(self) -> str:
        """Returns the name of the present server."""
        return f"engine-{self.index}-{self.starts}"

    @property
    def title(self) -> str:
        """Returns the engine's name for users, which is the name of its log. It stays when the server is replaced."""
        return Path(self.spec.log_path).stem

    @property
    def is_prefill(self) -> bool:
        """Returns whether the engine computes prompts for decode engines. The router sends no requests to it."""
        return self.spec.role == "prefill"

    @property
    def workers(self) -> int:
        return self.spec.tensor_parallel_size

    def launch(self, spawn: Spawn) -> None:
        """Starts a server under a new name."""
        self.starts += 1
        env = {**self.spec.env, ENGINE_VARIABLE: self.name}
        waits = self.spec.waits and self.starts == 1
        self.handle = spawn(replace(self.spec, env=env, waits=waits))
        self.control = self._control(self.handle.start(), self.spec.run_key)

    def stop(self) -> None:
        """Ends the server, if one was started."""
        if self.handle is not None:
            self.handle.stop()

    def is_alive(self, timeout_s: float) -> bool:
        """Returns whether the server runs and answers within `timeout_s`."""
        assert self.handle is not None
        return self.handle.poll() is None and self.control.is_healthy(timeout_s)

    def pause(self, drops_cache: bool = True) -> None:
        self.control.pause(self._pause_mode, drops_cache=drops_cache)

    def resume(self) -> None:
        self.control.resume()

    def free_memory(self) -> None:
        level = 1 if self.spec.keeps_weights else 2
        self.control.sleep(level, "wait")  # running requests would lose their keys and values

    def take_weight_memory(self) -> None:
        self.control.wake(["weights"])

    def take_cache_memory(self) -> None:
        self.control.wake(["kv_cache"])

    def start_weight_update(self) -> None:
        self.control.start_weight_update()

    def update_weights(self, message: dict[str, object]) -> None:
        self.control.update_weights(message)

    def finish_weight_update(self, version: int) -> None:
        self.control.finish_weight_update(version)

    def reset_prefix_cache(self) -> None:
        self.control.reset_prefix_cache()
