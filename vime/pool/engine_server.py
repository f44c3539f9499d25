"""Runs an engine server of any backend as a supervised subprocess. Every route needs the run's key.

The backends' servers differ in their command lines and environments. The module imports no torch, vLLM or Ray, because
its process only starts and watches the server, as a Ray actor or in the driver. The environment passes the key, never
a command line.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from slime.cluster.numa import children_on, choose_cpus
from vime.pool.process import Server, ServerSpec


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
    _master = ""
    ready_path = "/health"
    timeout_flag = "--engine-start-timeout-s"

    @property
    def _gate(self) -> Path:
        """The file whose existence allows the engine to take its device. It needs no shared file system."""
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

    def is_ready(self) -> bool:
        return super().is_ready() if self.spec.node == 0 else self.poll() is None

    def open_gate(self) -> None:
        """Lets an engine with `EngineSpec.waits` take its device."""
        if self.spec.waits:
            self._gate.touch()

    def stop(self) -> None:
        super().stop()
        self._gate.unlink(missing_ok=True)
