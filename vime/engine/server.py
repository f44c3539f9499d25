"""One engine server: vLLM's OpenAI API server as a supervised subprocess, with the run's key on every route.

Owns its command line and environment. Light on purpose (no torch, no vLLM, no Ray): as a Ray actor, or in the driver,
it is only the one who starts and watches. The key travels by environment, never on a command line.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

import vime
from vime.engine.control import EngineControl
from vime.engine.middleware import KEY_VARIABLE
from vime.engine.plugin import BACKEND, SUPERVISED_VARIABLE, WEIGHT_DIR_VARIABLE
from vime.engine.process import SupervisedProcess, free_port, require_free_port, wait_ready

SERVED_MODEL_NAME = "policy"
_CPU_ARGV = (
    "--enforce-eager",
    # A prompt cut in two would make vLLM step back a random generator, which those of the CPU cannot: it dies.
    "--no-enable-chunked-prefill",
    "--max-num-seqs=512",
    f"--kv-cache-memory-bytes={1 << 30}",
)


@dataclass(frozen=True)
class EngineSpec:
    """What one engine server is to be. `port` 0: a free one is picked when it starts.

    `vllm_argv` are flags of vLLM's server and win over the defaults here; `env` is added to this process's
    environment. `weight_dir` is the only directory weight updates may come from. `cpu_threads`: OpenMP threads of
    the engine on CPU; 0: half of the cores, which leaves the others to the API server (measured best on 2 cores).
    `index` is the engine's place in the pool, for whoever places it; it stays when the engine restarts.
    """

    model_path: str
    run_key: str = field(repr=False)
    log_path: str
    weight_dir: str
    host: str = "127.0.0.1"
    port: int = 0
    device: Literal["cpu", "cuda"] = "cpu"
    dtype: str = "float32"
    tensor_parallel_size: int = 1
    trust_remote_code: bool = False
    vllm_argv: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    cpu_threads: int = 0
    start_timeout_s: float = 600.0
    index: int = 0

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"


def command(spec: EngineSpec) -> list[str]:
    """The command line of the server; holds no secret."""
    flags = {
        "model": spec.model_path,
        "served-model-name": SERVED_MODEL_NAME,
        "host": spec.host,
        "port": str(spec.port),
        "dtype": spec.dtype,
        "tensor-parallel-size": str(spec.tensor_parallel_size),
        # The log-probs of the distribution that is sampled from, temperature included: what a trainer recomputes.
        "logprobs-mode": "processed_logprobs",
        # Sampling is the rollout's business; the checkpoint's generation_config.json must not change it.
        "generation-config": "vllm",
        "weight-transfer-config": json.dumps({"backend": BACKEND}),
        "middleware": "vime.engine.middleware.RunKeyMiddleware",
    }
    argv = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    for name, value in flags.items():
        argv += [f"--{name}", value]
    argv += ["--disable-uvicorn-access-log", "--enable-prompt-tokens-details"]
    if spec.device == "cpu":
        argv += _CPU_ARGV
    if spec.trust_remote_code:
        argv += ["--trust-remote-code"]
    return [*argv, *spec.vllm_argv]


def environment(spec: EngineSpec) -> dict[str, str]:
    """Environment of the server: this process's own, what vLLM needs, the key, and `spec.env` last."""
    root = str(Path(vime.__file__).parents[1])
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")])),
        KEY_VARIABLE: spec.run_key,
        SUPERVISED_VARIABLE: "1",
        WEIGHT_DIR_VARIABLE: spec.weight_dir,
        "VLLM_SERVER_DEV_MODE": "1",  # the control routes
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_HOST_IP": spec.host,  # what its processes meet each other at
    }
    if spec.device == "cpu":
        env |= {
            "OMP_NUM_THREADS": str(spec.cpu_threads or max(1, (os.cpu_count() or 1) // 2)),
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            # The worker lives in the engine's process: on 2 cores a third process costs more than it brings.
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        }
    return env | dict(spec.env)


class EngineServer:
    """Starts and watches one server. Not thread-safe; `start`, `wait_ready`, `stop` in that order."""

    def __init__(self, spec: EngineSpec) -> None:
        self.spec = spec
        self._process: SupervisedProcess | None = None

    def start(self) -> str:
        """Start the server and return its URL, before it is ready.

        ValueError when the port is taken or the host cannot be listened at.
        """
        if self.spec.port == 0:
            self.spec = replace(self.spec, port=free_port(self.spec.host))
        require_free_port(self.spec.host, self.spec.port, "an engine server")
        self._process = SupervisedProcess(command(self.spec), environment(self.spec), self.spec.log_path)
        return self.spec.url

    def wait_ready(self) -> None:
        """Return once /health answers. RuntimeError with the last log lines when it ends before, or never does."""
        control = EngineControl(self.spec.url, self.spec.run_key)
        where = urlsplit(self.spec.url).netloc
        wait_ready(
            self._started(),
            lambda: control.is_healthy(timeout_s=5),
            f"the engine server at {where}",
            self.spec.start_timeout_s,
            "--engine-start-timeout-s",
        )

    def poll(self) -> int | None:
        """Exit status of the server, or None while it runs."""
        return self._started().poll()

    def tail_log(self) -> str:
        """The last lines of the server's log."""
        return self._started().tail_log()

    def stop(self) -> None:
        """End the server and everything it started; nothing to do when it was never started."""
        if self._process is not None:
            self._process.stop()

    def _started(self) -> SupervisedProcess:
        assert self._process is not None, "start() comes first"
        return self._process
