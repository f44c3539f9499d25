"""One engine server: vLLM's OpenAI API server as a supervised subprocess. Every route needs the run's key.

Owns the server's command line and environment. The module imports no torch, vLLM or Ray, because its process only
starts and watches the server, as a Ray actor or in the driver. The environment passes the key, never a command line.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path
from typing import Literal

from slime.cluster.numa import children_on, choose_cpus
from slime.cluster.rendezvous import LOOPBACK_ONLY
from slime.weight_sync.variables import WEIGHT_DIR_VARIABLE
from vime.pool.process import Server, ServerSpec
from vime.vllm.cpu import engine as cpu_engine
from vime.vllm.versions import request_times, server_module, speculation_counts, token_routes
from vime.vllm.worker import routed_experts, shared_gpu
from vime.vllm.worker.plugin import BACKEND, SUPERVISED_VARIABLE

SERVED_MODEL_NAME = "policy"
_CPU_ARGV = (
    "--enforce-eager",
    # For a prompt in two chunks vLLM sets a random generator back. The CPU's generators cannot, and vLLM crashes.
    "--no-enable-chunked-prefill",
    f"--max-num-seqs={cpu_engine.MOST_REQUESTS}",
)


def option(tokens: Sequence[str]) -> str:
    """The name of the option that a flag sets: ["--no-enable-x"] and ["--enable-x=1"] -> "enable-x"."""
    return tokens[0].partition("=")[0].removeprefix("--").removeprefix("no-")


def pair_up(argv: Sequence[str]) -> list[list[str]]:
    """Group each flag with its values: ["--a", "1", "--b"] -> [["--a", "1"], ["--b"]]."""
    out: list[list[str]] = []
    for token in argv:
        if token.startswith("--"):
            out.append([token])
        else:
            out[-1].append(token)
    return out


@dataclass(frozen=True, kw_only=True)
class EngineSpec(ServerSpec):
    """Settings of one engine server.

    `vllm_argv` are flags of vLLM's server, and override the flags that this module sets. `env` is added to the
    environment of this process. Weight updates may come only from `weight_dir`. `cpu_threads`: OpenMP threads of an
    engine on CPU. 0 means half of the cores, which leaves the other half to the API server (fastest in measurements
    on 2 cores). `index`: the engine's place in the pool, which decides its devices. A restarted engine keeps `index`.
    """

    model_path: str
    weight_dir: str
    device: Literal["cpu", "cuda"] = "cpu"
    dtype: str = "float32"
    tensor_parallel_size: int = 1
    trust_remote_code: bool = False
    vllm_argv: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    cpu_threads: int = 0
    cache_bytes: int = cpu_engine.MOST_CACHE_BYTES
    """Bytes of the key-value cache of an engine on CPU, which vLLM fills with zeros when it starts."""
    stateful: bool = False
    """Whether layers have a state of fixed size, such as gated delta nets. vLLM caches the states of prefixes only with
    chunked prefill, which an engine on CPU does without."""
    start_timeout_s: float = 600.0
    index: int = 0
    sleeps: bool = False
    """Whether the engine must be able to free its device memory and allocate the memory again."""
    gpu_buses: tuple[str, ...] = ()
    """PCI addresses of the engine's GPUs. The engine runs on the CPUs near them; empty: on any CPUs."""
    numa_binding: str = "auto"
    tells_experts: bool = False
    """Whether the answers must contain the experts of each token."""
    waits: bool = False
    """Whether the engine takes its device only after `open_gate`; `start_timeout_s` counts from `wait_ready`."""
    nodes: int = 1
    """Number of nodes of the engine. Each node has its own server process."""
    node: int = 0
    """Index of this process's node. Node 0 serves HTTP, the other nodes have workers only."""


class EngineServer(Server[EngineSpec]):
    """One vLLM server, in the driver or as a Ray actor."""

    name = "the engine server"
    _master = ""
    ready_path = "/health"
    timeout_flag = "--engine-start-timeout-s"

    @property
    def _gate(self) -> Path:
        """The engine may take its device when this file exists. The file needs no shared file system."""
        return Path(f"{self.spec.log_path}.gate").absolute()

    def meeting_point(self) -> str:
        """HOST:PORT on this node, where the processes of an engine of several nodes connect to each other."""
        return f"{self.spec.host}:{self._hold()}"

    def start(self, master: str = "") -> str:
        """Start the server. `master`: the `meeting_point` of the first process, for an engine of several nodes."""
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
        """Let an engine with `EngineSpec.waits` take its device."""
        if self.spec.waits:
            self._gate.touch()

    def stop(self) -> None:
        super().stop()
        self._gate.unlink(missing_ok=True)

    def command(self) -> list[str]:
        spec = self.spec
        flags = {
            "model": spec.model_path,
            "served-model-name": SERVED_MODEL_NAME,
            "host": spec.host,
            "port": str(spec.port),
            "dtype": spec.dtype,
            "tensor-parallel-size": str(spec.tensor_parallel_size),
            # Log-probs of the distribution that is sampled from, after temperature: the trainer recomputes these.
            "logprobs-mode": "processed_logprobs",
            # The rollout sets the sampling parameters. The checkpoint's generation_config.json must not change them.
            "generation-config": "vllm",
            "weight-transfer-config": json.dumps({"backend": BACKEND}),
            "middleware": "vime.vllm.worker.middleware.RunKeyMiddleware",
        }
        argv: list[str] = []
        for name, value in flags.items():
            argv += [f"--{name}", value]
        argv += ["--disable-uvicorn-access-log", "--enable-prompt-tokens-details"]
        argv += request_times(spec.vllm_argv) + speculation_counts(spec.vllm_argv)
        if spec.node == 0:
            argv += token_routes()
        if spec.device == "cpu":
            argv += [*_CPU_ARGV, f"--kv-cache-memory-bytes={spec.cache_bytes}"]
            argv += ["--no-enable-prefix-caching"] if spec.stateful else []
        if spec.sleeps:
            argv += ["--enable-sleep-mode"]
        if spec.tells_experts:
            argv += [routed_experts.FLAG]
        if spec.trust_remote_code:
            argv += ["--trust-remote-code"]
        argv += self._multi_node()
        given = {option(tokens) for tokens in pair_up(spec.vllm_argv)}
        ours = [token for tokens in pair_up(argv) if option(tokens) not in given for token in tokens]
        module = server_module() if spec.node == 0 else "vime.vllm.headless"
        return [sys.executable, "-m", "vime.vllm.serve", module, *ours, *spec.vllm_argv]

    def _multi_node(self) -> list[str]:
        """Flags of vLLM's multi-node mode; empty for an engine of one node."""
        spec = self.spec
        if spec.nodes == 1:
            return []
        host, _, port = self._master.rpartition(":")
        flags = ["--nnodes", str(spec.nodes), "--node-rank", str(spec.node)]
        if self._master:  # empty in `vime plan`, which starts no engine
            flags += ["--master-addr", host, "--master-port", port]
        return [*flags, "--distributed-executor-backend", "mp", *(["--headless"] if spec.node else [])]

    def environment(self) -> dict[str, str]:
        """Variables of every server, then those of vLLM, then `spec.env`, which overrides the others."""
        spec = self.spec
        env = {
            **super().environment(),
            SUPERVISED_VARIABLE: "1",
            WEIGHT_DIR_VARIABLE: spec.weight_dir,
            "VLLM_SERVER_DEV_MODE": "1",  # serves the control routes
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            "HF_HUB_OFFLINE": "1",
            "VLLM_HOST_IP": spec.host,  # the engine's processes connect at this address
        }
        if spec.tells_experts:
            env[routed_experts.VARIABLE] = "1"
        if ip_address(spec.host).is_loopback:
            # A network interface that the user chose for a cluster does not reach loopback addresses.
            env |= LOOPBACK_ONLY
        if spec.sleeps:
            env[shared_gpu.SLEEPS_VARIABLE] = "1"
        if spec.waits:
            # vLLM's own time limit includes the wait for the gate, so a day is set. start_timeout_s is the limit.
            env |= {shared_gpu.GATE_VARIABLE: str(self._gate), "VLLM_ENGINE_READY_TIMEOUT_S": str(24 * 3600)}
        if spec.device == "cuda":
            # A forked engine process starts faster, because the server's imports are in it already. vLLM uses another
            # start method where it cannot fork.
            env.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "fork")
            env.setdefault(
                "OMP_NUM_THREADS", "1"
            )  # as in an actor of Ray, which some servers are children of
        if spec.device == "cpu":
            threads = spec.cpu_threads or max(1, (os.cpu_count() or 1) // 2)
            compiles = "enforce-eager" in {option(tokens) for tokens in pair_up(spec.vllm_argv)}
            env |= cpu_engine.environment(env, threads, eager=not compiles)
        return env | dict(spec.env)
