"""Runs one vLLM server as a supervised subprocess: builds its command line and environment. EngineServer does the rest.

The module imports no torch, vLLM or Ray, because its process only starts and watches the server.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Collection
from dataclasses import dataclass
from ipaddress import ip_address

from slime.cluster.rendezvous import LOOPBACK_ONLY
from slime.weight_sync.variables import LOCAL_DIR_VARIABLE, WEIGHT_DIR_VARIABLE
from vime.pool.control import SERVED_MODEL_NAME
from vime.pool.engine_server import EngineServer, EngineSpec, option, pair_up
from vime.vllm.caches.ages import KEEPS_VARIABLE
from vime.vllm.caches.connector import transfer_flags
from vime.vllm.cpu import engine as cpu_engine
from vime.vllm.serve import STANDBY
from vime.vllm.versions import (
    processed_pixels,
    request_times,
    server_module,
    speculation_counts,
    token_routes,
)
from vime.vllm.worker import adapter, bitwise
from vime.vllm.worker.columns import routed_experts
from vime.vllm.worker.plugin import BACKEND, SUPERVISED_VARIABLE
from vime.vllm.worker.settings import OPTION, EngineSettings

SAMPLING = {
    # Log-probs of the sampled distribution, after temperature: the trainer recomputes these.
    "logprobs_mode": "processed_logprobs",
    # The rollout sets the sampling parameters. The checkpoint's generation_config.json must not change them.
    "generation_config": "vllm",
}
"""Flags that each server gets with this value."""
SCORED_TOKENS = 2048
"""Tokens per pass of a scoring engine on GPUs. vLLM computes logits of all these tokens outside its memory share."""
GRAPH_TOKENS = (1, 2, 4, *range(8, 256, 8), *range(256, 512, 16), 512, 640, 768, 1024, 1280, 1536, 2048)
"""Tokens per step for which an engine on a GPU captures a CUDA graph: vLLM's own numbers up to 512, and larger ones.

A step has one token for each running request, plus the tokens of new prompts. With 512 running requests and a prompt,
it exceeds vLLM's largest number. Without a graph, the host starts each kernel, which takes longer than a small model
computes (benchmarks/reports/rollout_graphs_qwen2_5_0_5b_h200.md).
"""
_CHOOSES_GRAPHS = (
    "cudagraph-capture-sizes",
    "max-cudagraph-capture-size",
    "compilation-config",
    "enforce-eager",
)
"""vLLM's options that choose the steps with graphs."""
_MANY_REQUESTS = 256
"""With fewer requests, the steps rarely exceed vLLM's largest graph, and the start need not capture more graphs."""
WORKERS = {"cuda": "vime.vllm.worker.workers.GpuWorker", "cpu": "vime.vllm.cpu.worker.CpuWorker"}
_CPU_ARGV = (
    "--enforce-eager",
    # For a prompt in two chunks, vLLM resets a random generator. Generators on the CPU cannot be reset, and vLLM
    # crashes.
    "--no-enable-chunked-prefill",
    f"--max-num-seqs={cpu_engine.MOST_REQUESTS}",
    # The run sets the size of the key-value cache, so vLLM need not measure the tower with the largest image.
    "--skip-mm-profiling",
)


@dataclass(frozen=True, kw_only=True)
class VllmSpec(EngineSpec):
    """Settings of a vLLM server. `vllm_argv` are flags of vLLM's server, and override the flags that this module
    sets."""

    vllm_argv: tuple[str, ...] = ()
    cache_bytes: int = cpu_engine.MOST_CACHE_BYTES
    """Bytes of the key-value cache of an engine on CPUs, which vLLM fills with zeros when it starts."""
    stateful: bool = False
    """True if layers have a state of fixed size, such as gated delta nets. vLLM caches the states of prefixes only with
    chunked prefill, which an engine on CPUs does not use."""
    whole_images: bool = False
    """True if a token of an image sees later tokens of the image, so that a step must have whole images."""
    sleeps: bool = False
    """True if the engine must be able to free its device memory and allocate the memory again."""
    reports_experts: bool = False
    """True if the answers must contain each token's experts."""
    top_tokens: int = 0
    """Maximum number of ids with log-probs per token in an answer."""
    temperature: float = 1.0
    """Divisor of the model's logits, applied before a request's own temperature."""
    lora_rank: int = 0
    """The largest rank of the adapters that updates bring. 0 means that updates bring all weights."""
    bitwise: tuple[str, ...] = ()
    """Operators of the trainer that the engine computes with. The tuple is empty if the engine uses only vLLM's own
    operators."""
    fp8_scales: str | None = None
    """Scales of linear layers that compute in fp8 as in the trainer (`EngineSettings.fp8_scales`)."""
    scores: bool = False
    """True if the engine computes log-probs of whole prompts."""
    keeps_cache: bool = False
    """True if the engine keeps keys and values over weight updates, and reports their ages."""


class VllmServer(EngineServer):
    """Runs one vLLM server, in the driver or as a Ray actor."""

    spec: VllmSpec

    def command(self) -> list[str]:
        spec = self.spec
        options = {option(tokens) for tokens in pair_up(spec.vllm_argv)}
        flags = {
            "model": spec.model_path,
            "served-model-name": SERVED_MODEL_NAME,
            "host": spec.host,
            "port": str(spec.port),
            "dtype": spec.dtype,
            "tensor-parallel-size": str(spec.tensor_parallel_size),
            **{name.replace("_", "-"): value for name, value in SAMPLING.items()},
            "weight-transfer-config": json.dumps({"backend": BACKEND}),
            "middleware": "vime.vllm.worker.middleware.RunKeyMiddleware",
            "worker-cls": WORKERS[spec.device],
            **({"load-format": "dummy"} if spec.starts_empty else {}),
        }
        argv: list[str] = []
        for name, value in flags.items():
            argv += [f"--{name}", value]
        argv += ["--disable-uvicorn-access-log", "--enable-prompt-tokens-details"]
        argv += request_times(spec.vllm_argv) + speculation_counts(spec.vllm_argv) + processed_pixels()
        argv += ["--disable-chunked-mm-input"] if spec.whole_images else []
        # A request has its pixels, and the tower's outputs have another cache. vLLM's cache of pixels would hold 4 GiB
        # in the engine's process, and would never be read.
        argv += ["--mm-processor-cache-gb", "0"]
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
        if spec.reports_experts:
            argv += [routed_experts.FLAG]
        if spec.device == "cuda":
            argv += self._graphs(options)
        if spec.lora_rank:
            argv += adapter.server_flags(spec.lora_rank)
        if spec.trust_remote_code:
            argv += ["--trust-remote-code"]
        argv += transfer_flags(spec) + self._multi_node()
        ours = [token for tokens in pair_up(argv) if option(tokens) not in options for token in tokens]
        theirs = [tokens for tokens in pair_up(spec.vllm_argv) if option(tokens) != OPTION]
        ours += self._settings().flags(*[t for t in pair_up(spec.vllm_argv) if option(t) == OPTION][-1:])
        module = server_module() if spec.node == 0 else "vime.vllm.headless"
        more = [token for tokens in theirs for token in tokens]
        return [sys.executable, "-m", "vime.vllm.serve", module, *ours, *more]

    def standby_command(self) -> list[str]:
        modules = [server_module(), WORKERS[self.spec.device].rpartition(".")[0]]
        return [sys.executable, "-m", "vime.vllm.serve", STANDBY, *modules]

    def _settings(self) -> EngineSettings:
        spec = self.spec
        return EngineSettings(
            gate=str(self._gate) if spec.waits else None,
            temperature=spec.temperature,
            routed_experts=spec.reports_experts,
            bitwise=tuple(spec.bitwise),
            fp8_scales=spec.fp8_scales,
        )

    def _graphs(self, options: Collection[str]) -> list[str]:
        """Returns vLLM's flags for CUDA graphs. `options` has the names of the user's flags for vLLM."""
        flags = ["--compilation-config", bitwise.compilation()] if self.spec.bitwise else []
        values = {option(tokens): tokens[-1].rpartition("=")[2] for tokens in pair_up(self.spec.vllm_argv)}
        few = int(values.get("max-num-seqs", _MANY_REQUESTS)) < _MANY_REQUESTS and not self.spec.bitwise
        if few or any(name.startswith(_CHOOSES_GRAPHS) for name in options):
            return flags
        return [*flags, "--cudagraph-capture-sizes", *map(str, GRAPH_TOKENS)]

    def _multi_node(self) -> list[str]:
        """Returns the flags of vLLM's multi-node mode. The list is empty for an engine on one node."""
        spec = self.spec
        if spec.nodes == 1:
            return []
        host, _, port = self._master.rpartition(":")
        flags = ["--nnodes", str(spec.nodes), "--node-rank", str(spec.node)]
        if self._master:  # empty in `vime plan`, which starts no engine
            flags += ["--master-addr", host, "--master-port", port]
        return [*flags, "--distributed-executor-backend", "mp", *(["--headless"] if spec.node else [])]

    def environment(self) -> dict[str, str]:
        """Returns the variables of every server, then those of vLLM, then `spec.env`, which overrides the others."""
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
        if spec.role != "both":  # NIXL reads them
            env |= {
                "VLLM_NIXL_SIDE_CHANNEL_HOST": spec.host,
                "VLLM_NIXL_SIDE_CHANNEL_PORT": str(self._hold()),
            }
        if spec.keeps_cache:
            env[KEEPS_VARIABLE] = "1"
        if ip_address(spec.host).is_loopback:
            # A network interface that the user chose for a cluster does not reach loopback addresses.
            env |= LOOPBACK_ONLY
        if spec.waits:
            # vLLM's own time limit includes the wait for the gate, so it is set to one day. start_timeout_s is the
            # limit that applies.
            env["VLLM_ENGINE_READY_TIMEOUT_S"] = str(24 * 3600)
        if spec.device == "cuda":
            # A forked engine process starts faster, because it inherits the server's imports. vLLM uses another start
            # method if it cannot fork.
            env.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "fork")
            # vLLM's estimate multiplies the memory of a graph by the number of graphs, and takes the product from the
            # KV cache. The plan counts graphs outside of the engine's share.
            env.setdefault("VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS", "0")
            env.setdefault(
                "OMP_NUM_THREADS", "1"
            )  # as in a Ray actor, which is the parent process of some servers
        if spec.device == "cpu":
            threads = spec.cpu_threads or max(1, (os.cpu_count() or 1) // 2)
            compiles = "enforce-eager" in {option(tokens) for tokens in pair_up(spec.vllm_argv)}
            env |= cpu_engine.environment(env, threads, eager=not compiles)
        return env | dict(spec.env)
