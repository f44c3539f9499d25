"""One vLLM server as a supervised subprocess: its command line and its environment. The rest is EngineServer's.

The module imports no torch, vLLM or Ray, because its process only starts and watches the server.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from ipaddress import ip_address

from slime.cluster.rendezvous import LOOPBACK_ONLY
from slime.weight_sync.variables import LOCAL_DIR_VARIABLE, WEIGHT_DIR_VARIABLE
from vime.pool.control import SERVED_MODEL_NAME
from vime.pool.engine_server import EngineServer, EngineSpec, option, pair_up
from vime.vllm.cpu import engine as cpu_engine
from vime.vllm.versions import request_times, server_module, speculation_counts, token_routes
from vime.vllm.worker import adapter, bitwise, routed_experts
from vime.vllm.worker.plugin import BACKEND, SUPERVISED_VARIABLE
from vime.vllm.worker.settings import OPTION, EngineSettings

SCORED_TOKENS = 2048
"""Tokens of a pass of an engine on GPUs that scores: vLLM makes logits of all of them, outside its memory share."""
WORKERS = {"cuda": "vime.vllm.worker.workers.GpuWorker", "cpu": "vime.vllm.cpu.worker.CpuWorker"}
_CPU_ARGV = (
    "--enforce-eager",
    # For a prompt in two chunks vLLM sets a random generator back. The CPU's generators cannot, and vLLM crashes.
    "--no-enable-chunked-prefill",
    f"--max-num-seqs={cpu_engine.MOST_REQUESTS}",
)


@dataclass(frozen=True, kw_only=True)
class VllmSpec(EngineSpec):
    """Settings of one vLLM server. `vllm_argv` are flags of vLLM's server, and override the flags that this module
    sets."""

    vllm_argv: tuple[str, ...] = ()
    cache_bytes: int = cpu_engine.MOST_CACHE_BYTES
    """Bytes of the key-value cache of an engine on CPU, which vLLM fills with zeros when it starts."""
    stateful: bool = False
    """Whether layers have a state of fixed size, such as gated delta nets. vLLM caches the states of prefixes only with
    chunked prefill, which an engine on CPU does without."""
    sleeps: bool = False
    """Whether the engine must be able to free its device memory and allocate the memory again."""
    tells_experts: bool = False
    """Whether the answers must contain the experts of each token."""
    top_tokens: int = 0
    """The most ids with log-probs that an answer may have for a token."""
    temperature: float = 1.0
    """The model's logits are divided by it, before a request's own temperature."""
    lora_rank: int = 0
    """The largest rank of the adapters that updates bring. 0: updates bring all weights."""
    bitwise: tuple[str, ...] = ()
    """Whether it computes with the trainer's operators."""
    scores: bool = False
    """Whether the engine is there to give log-probs of whole prompts."""


class VllmServer(EngineServer):
    """One vLLM server, in the driver or as a Ray actor."""

    spec: VllmSpec

    def command(self) -> list[str]:
        spec = self.spec
        given = {option(tokens) for tokens in pair_up(spec.vllm_argv)}
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
            "worker-cls": WORKERS[spec.device],
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
        if spec.scores and spec.device == "cuda":
            argv += ["--max-num-batched-tokens", str(SCORED_TOKENS)]
        if spec.top_tokens:
            argv += ["--max-logprobs", str(max(spec.top_tokens, 20))]  # 20 is vLLM's default
        if spec.tells_experts:
            argv += [routed_experts.FLAG]
        if spec.bitwise and spec.device == "cuda":
            argv += ["--compilation-config", bitwise.compilation(given)]
        if spec.lora_rank:
            argv += adapter.server_flags(spec.lora_rank)
        if spec.trust_remote_code:
            argv += ["--trust-remote-code"]
        argv += self._multi_node()
        ours = [token for tokens in pair_up(argv) if option(tokens) not in given for token in tokens]
        theirs = [tokens for tokens in pair_up(spec.vllm_argv) if option(tokens) != OPTION]
        ours += self._settings().flags(*[t for t in pair_up(spec.vllm_argv) if option(t) == OPTION][-1:])
        module = server_module() if spec.node == 0 else "vime.vllm.headless"
        more = [token for tokens in theirs for token in tokens]
        return [sys.executable, "-m", "vime.vllm.serve", module, *ours, *more]

    def _settings(self) -> EngineSettings:
        spec = self.spec
        return EngineSettings(
            gate=str(self._gate) if spec.waits else None,
            temperature=spec.temperature,
            routed_experts=spec.tells_experts,
            bitwise=tuple(spec.bitwise),
        )

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
        if spec.local_checkpoint_dir is not None:
            env[LOCAL_DIR_VARIABLE] = spec.local_checkpoint_dir
        if spec.bitwise:
            env |= bitwise.ENVIRONMENT
        if ip_address(spec.host).is_loopback:
            # A network interface that the user chose for a cluster does not reach loopback addresses.
            env |= LOOPBACK_ONLY
        if spec.waits:
            # vLLM's own time limit includes the wait for the gate, so a day is set. start_timeout_s is the limit.
            env["VLLM_ENGINE_READY_TIMEOUT_S"] = str(24 * 3600)
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
