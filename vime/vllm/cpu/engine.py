"""Settings of an engine on CPUs: its process is a fork of the server's process, and nothing is compiled.

vLLM starts the engine's process with spawn, because that process must load another OpenMP library than its parent. The
imports of a spawned process take seven seconds. Our server loads that library itself, so the fork needs no import.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from slime.models import Hf

MOST_REQUESTS = 512
"""Value of --max-num-seqs: most requests in one step."""
MOST_CACHE_BYTES = 1 << 30
_LEAST_CACHE_BYTES = 1 << 26
_PROMPT_TOKENS = 256
_OTHER_STATE = ("kv_lora_rank", "linear_num_value_heads", "mamba_d_state")
METHOD_VARIABLE = "VLLM_WORKER_MULTIPROC_METHOD"
WAIT_VARIABLE = "OMP_WAIT_POLICY"
EAGER_VARIABLE = "TORCHDYNAMO_DISABLE"
KERNELS_VARIABLE = "ONEDNN_PRIMITIVE_CACHE_CAPACITY"
MOST_KERNELS = 16
"""Number of oneDNN kernels for matrix products that a process keeps. Each kernel serves one shape and one number of
tokens.

A kernel takes 0.3 MiB. The layers of vLLM keep more kernels (vime.vllm.cpu.memory). With oneDNN's own limit of 1024,
the memory of an engine grows for hundreds of steps.
"""


def environment(inherited: Mapping[str, str], threads: int, *, eager: bool) -> dict[str, str]:
    """Returns the environment variables that a server on CPUs needs in addition to `inherited`, for `threads` threads.

    `eager` means that the model runs without compilation. The sampler then runs without compilation too, which saves
    ten seconds in the first rollout.
    """
    env = {
        "OMP_NUM_THREADS": str(threads),
        # Threads that wait for work sleep. By default they spin for milliseconds, on the core that the server needs.
        WAIT_VARIABLE: inherited.get(WAIT_VARIABLE, "passive"),
        KERNELS_VARIABLE: inherited.get(KERNELS_VARIABLE, str(MOST_KERNELS)),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        # The worker runs in the engine's process: on 2 cores a third process costs more time than it saves.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        METHOD_VARIABLE: inherited.get(METHOD_VARIABLE, "fork"),
    }
    if eager:
        env[EAGER_VARIABLE] = "1"
    if library := torchs_openmp():
        env["LD_PRELOAD"] = ":".join(filter(None, [inherited.get("LD_PRELOAD"), library]))
    return env


def cache_bytes(hf_config: Hf, response_tokens: int, requests: int) -> int:
    """Returns the bytes of a float32 key-value cache, between 64 MiB and 1 GiB.

    It has room for `requests` concurrent requests with 256 prompt tokens and `response_tokens` each, and for at least
    two requests of the model's longest context. A model with other state than keys and values gets 1 GiB. Requests that
    do not fit wait.
    """
    heads = hf_config.get("num_key_value_heads") or hf_config.get("num_attention_heads")
    if heads is None or any(key in hf_config for key in _OTHER_STATE):
        return MOST_CACHE_BYTES
    size = hf_config.get("head_dim") or hf_config["hidden_size"] // hf_config["num_attention_heads"]
    token: int = hf_config["num_hidden_layers"] * 2 * heads * size * 4
    tokens = min(requests, MOST_REQUESTS) * (_PROMPT_TOKENS + response_tokens)
    longest: int = hf_config.get("max_position_embeddings", MOST_CACHE_BYTES)
    wanted = max(tokens, 2 * longest) * token
    return min(max(wanted, _LEAST_CACHE_BYTES), MOST_CACHE_BYTES)


def torchs_openmp() -> str | None:
    """Returns the path of the OpenMP library in torch's package, or None if torch uses the system's. Does not import
    torch.

    Without this path, vLLM's kernels would load the system's library first, which has a second pool of threads.
    """
    spec = find_spec("torch")
    for folder in [] if spec is None else spec.submodule_search_locations or []:
        for folder_path in (Path(folder, "lib"), Path(folder).with_name("torch.libs")):
            if found := sorted(folder_path.glob("libgomp*.so*")):
                return str(found[0])
    return None


def keeping_the_start_method(
    update: Callable[[type, VllmConfig], None],
) -> Callable[[type, VllmConfig], None]:
    """Wraps vLLM's `CpuPlatform.check_and_update_config` so that it keeps the start method of the environment."""

    def check_and_update_config(cls: type, vllm_config: VllmConfig) -> None:
        method = os.environ.get(METHOD_VARIABLE)
        update(cls, vllm_config)
        if method is not None:
            os.environ[METHOD_VARIABLE] = method

    return check_and_update_config
