"""Runs an engine server of any backend as a supervised subprocess. Every route needs the run's key.

The backends' servers differ in their command lines and environments. The module imports no torch, vLLM or Ray, because
its process only starts and watches the server, as a Ray actor or in the driver. The environment passes the key, never
a command line.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from slime.cluster.numa import children_on, choose_cpus
from slime.weight_sync.variables import ENGINE_VARIABLE
from vime.pool.process import Server, ServerSpec, SupervisedProcess

logger = logging.getLogger(__name__)


def option(tokens: Sequence[str]) -> str:
    """Returns the name of the option that a flag sets: ["--no-enable-x"] and ["--enable-x=1"] -> "enable-x"."""
    return tokens[0].partition("=")[0].removeprefix("--").removeprefix("no-")


def pair_up(argv: Sequence[str]) -> list[list[str]]:
    """Groups each flag with its values: ["--a", "1", "--b"] -> [["--a", "1"], ["--b"]]."""
    out: list[list[str]] = []
    for token in argv:
        if token.startswith("--"):
            out.append([token])
        else:
            out[-1].append(token)
    return out


Role = Literal["both", "prefill", "decode"]


@dataclass(frozen=True, kw_only=True)
class EngineSpec(ServerSpec):
    """Settings of one engine server.

    `env` is added to the environment of this process. Weight updates may come only from `weight_dir`. `cpu_threads`:
    OpenMP threads of an engine on CPU. 0 means half of the cores, which leaves the other half to the API server
    (fastest in measurements on 2 cores). `index`: the engine's index in the pool, which decides its devices. A
    restarted engine keeps `index`.
    """

    model_path: str
    weight_dir: str
    local_checkpoint_dir: str | None = None
    """Folder for the host's copy of the weights; None: `weight_dir`."""
    device: Literal["cpu", "cuda"] = "cpu"
    dtype: str = "float32"
    tensor_parallel_size: int = 1
    trust_remote_code: bool = False
    env: Mapping[str, str] = field(default_factory=dict)
    cpu_threads: int = 0
    start_timeout_s: float = 600.0
    index: int = 0
    gpu_buses: tuple[str, ...] = ()
    """PCI addresses of the engine's GPUs. The engine runs on the CPUs near them; empty: on any CPUs."""
    numa_binding: str = "auto"
    keeps_weights: bool = False
    """True if a sleeping engine keeps its weights in host memory. Otherwise it drops them, because the next update
    brings the complete weights."""
    starts_empty: bool = False
    """True if the engine starts without the checkpoint's weights, because its first update brings every value. It is
    paused until then."""
    waits: bool = False
    """True if the engine takes its device only after `open_gate`; `start_timeout_s` counts from `wait_ready`."""
    role: Role = "both"
    """A prefill engine computes prompts for the decode engines. Both: it reads prompts and writes answers."""
    nodes: int = 1
    """Number of nodes of the engine. Each node has its own server process."""
    node: int = 0
    """Index of this process's node. Node 0 serves HTTP; the other nodes run only workers."""


class EngineServer(Server[EngineSpec]):
    """One engine server, in the driver or as a Ray actor."""

    name = "the engine server"
    standby: Standby | None = None
    """Gives the engine a process that has imported the server's modules, if it has one."""
    _master = ""
    ready_path = "/health"
    timeout_flag = "--engine-start-timeout-s"

    @property
    def _gate(self) -> Path:
        """Returns the file whose existence allows the engine to take its device. The file needs no shared file
        system."""
        return Path(f"{self.spec.log_path}.gate").absolute()

    def meeting_point(self) -> str:
        """Returns HOST:PORT on this node, to which the processes of a multi-node engine connect."""
        return f"{self.spec.host}:{self._hold()}"

    def start(self, master: str = "") -> str:
        """Starts the server. `master` is the `meeting_point` of the first process, for a multi-node engine."""
        self._master = master
        self._gate.unlink(missing_ok=True)
        cpus: set[int] = set()
        if self.spec.gpu_buses:
            cpus, line = choose_cpus(self.spec.gpu_buses, self.spec.numa_binding)
            log = Path(self.spec.log_path)
            log.parent.mkdir(parents=True, exist_ok=True)
            with log.open("a", encoding="utf-8") as file:
                file.write(f"NUMA: {line}\n")
        with children_on(cpus):
            return super().start()

    def standby_command(self) -> list[str] | None:
        """Returns the command of a process that imports the server's modules and waits for an order (`Standby`), or
        None if the backend has no such command."""
        return None

    def _start_process(self) -> SupervisedProcess:
        command, env, log = self.command(), self.environment(), self.spec.log_path
        waiting = self.standby.take(command, env, log) if self.standby is not None else None
        return SupervisedProcess(command, env, log) if waiting is None else waiting

    def is_ready(self) -> bool:
        return super().is_ready() if self.spec.node == 0 else self.poll() is None

    def open_gate(self) -> None:
        """Lets an engine with `EngineSpec.waits` take its device."""
        if self.spec.waits:
            self._gate.touch()

    def stop(self) -> None:
        super().stop()
        self._gate.unlink(missing_ok=True)


_LATE = {ENGINE_VARIABLE, "CUDA_VISIBLE_DEVICES"}
"""Variables that a server reads after its imports."""


class Standby:
    """Keeps a process that has imported the modules of an engine's server, on this host. An engine that is replaced
    becomes this process, so its start does not wait for the imports. All threads may call every method.

    The process starts `after_s` seconds after the last start of an engine. With 0, no process starts.
    """

    def __init__(self, after_s: float) -> None:
        self._after_s, self._lock = after_s, threading.Lock()
        self._process: SupervisedProcess | None = None
        self._env: Mapping[str, str] = {}
        self._due: float | None = None
        self._ended = False

    def keep(self, server: type[EngineServer], spec: EngineSpec) -> None:
        """Starts the process if it is due. It has the environment of an engine with `spec` that is replaced. Call this
        regularly while all engines serve."""
        if not self._after_s or spec.nodes > 1 or spec.role != "both":
            return
        with self._lock:
            if self._ended or self._process is not None:
                return
            self._due = self._due or time.monotonic() + self._after_s
            if time.monotonic() < self._due:
                return
            example = server(replace(spec, waits=False))
            if (command := example.standby_command()) is None:
                self._after_s = 0
                return
            self._env = example.environment()
            log = str(Path(spec.log_path).with_name("engine-standby.log"))
            try:
                self._process = SupervisedProcess(command, self._env, log, takes_input=True)
            except OSError as error:  # such as a full disk; the run needs no standby
                logger.warning("no process waits for the next lost engine: %s", error)
                self._due = None

    def take(self, command: Sequence[str], env: Mapping[str, str], log_path: str) -> SupervisedProcess | None:
        """Returns the process, which becomes the server with this command line and environment. None if there is no
        process, or if its modules were imported in another environment."""
        with self._lock:
            process, self._process, self._due = self._process, None, None
            if process is None:
                return None
            changed = {name for name in env.keys() | self._env.keys() if env.get(name) != self._env.get(name)}
            cpus = sorted(os.sched_getaffinity(0))
            order = {"command": list(command), "env": dict(env), "log": log_path, "cpus": cpus}
            try:
                if changed <= _LATE and process.poll() is None:
                    process.send(f"{json.dumps(order)}\n".encode(), log_path)
                    return process
            except OSError:  # it has just ended
                pass
            process.stop()
            return None

    def stop(self) -> None:
        """Ends the process. No other one starts."""
        with self._lock:
            self._ended, process, self._process = True, self._process, None
        if process is not None:
            process.stop()
