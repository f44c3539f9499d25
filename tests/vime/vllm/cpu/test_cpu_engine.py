"""Tests the settings of an engine on CPUs. tests/e2e/engines/test_engine_start.py has a real engine that is forked."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from vime.start.fork_call import run_in_fork
from vime.vllm import patches
from vime.vllm.cpu import engine as cpu_engine
from vime.vllm.cpu.engine import METHOD_VARIABLE, WAIT_VARIABLE, cache_bytes, environment, torchs_openmp
from vime.vllm.server import VllmServer, VllmSpec

TINY = {
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "hidden_size": 256,
    "head_dim": 32,
    "max_position_embeddings": 1024,
}
MIB = 1 << 20


def test_the_cache_holds_the_requests_of_a_rollout():
    token = 2 * 2 * 2 * 32 * 4
    assert cache_bytes(TINY, 512, 256) == 256 * 768 * token == 192 * MIB
    assert cache_bytes(TINY, 512, 1024) == cache_bytes(TINY, 512, 512), "vLLM computes 512 at once"
    assert cache_bytes(TINY, 5, 1) == 64 * MIB
    assert cache_bytes(TINY | {"max_position_embeddings": 1 << 17}, 5, 1) == 256 * MIB, "two longest contexts"
    assert cache_bytes(TINY | {"num_hidden_layers": 48}, 8192, 512) == 1024 * MIB
    own = {key: TINY[key] for key in TINY if key not in ("head_dim", "num_key_value_heads")}
    assert cache_bytes(own, 512, 128) == 4 * cache_bytes(TINY, 512, 128), "a head for each query head"
    assert cache_bytes(TINY | {"kv_lora_rank": 512}, 5, 1) == 1024 * MIB


def test_a_server_loads_torchs_openmp_and_forks():
    library = torchs_openmp()
    assert library is not None and Path(library).is_file()
    env = environment({"LD_PRELOAD": "/lib/other.so"}, 3, eager=True)
    assert env["LD_PRELOAD"] == f"/lib/other.so:{library}"
    assert (env["OMP_NUM_THREADS"], env[METHOD_VARIABLE], env["TORCHDYNAMO_DISABLE"]) == ("3", "fork", "1")
    assert environment({METHOD_VARIABLE: "spawn"}, 1, eager=True)[METHOD_VARIABLE] == "spawn", (
        "a user's choice"
    )
    assert env[WAIT_VARIABLE] == "passive"
    assert environment({WAIT_VARIABLE: "active"}, 1, eager=True)[WAIT_VARIABLE] == "active", "a user's choice"
    made = {"model_path": "model", "log_path": "log", "weight_dir": "/weights", "run_key": "k"}
    compiled = VllmSpec(**made, vllm_argv=("--no-enforce-eager",))
    assert "TORCHDYNAMO_DISABLE" not in VllmServer(compiled).environment()
    assert VllmServer(VllmSpec(**made)).environment()["TORCHDYNAMO_DISABLE"] == "1"


def test_a_model_with_a_state_is_served_without_a_cache_of_prefixes():
    made = {"model_path": "model", "log_path": "log", "weight_dir": "/weights", "run_key": "k"}
    off = "--no-enable-prefix-caching"
    assert off in VllmServer(VllmSpec(**made, stateful=True)).command()
    assert off not in VllmServer(VllmSpec(**made)).command()
    assert off not in VllmServer(VllmSpec(**made, stateful=True, device="cuda")).command()


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_vllm_keeps_the_start_method(method):
    """The test uses a fork, because vLLM's CPU platform sets many variables. The test process has imported vLLM."""
    from vllm.config import CacheConfig, DeviceConfig, VllmConfig

    def configure() -> tuple[str, str]:
        os.environ.pop("NUMEXPR_MAX_THREADS", None)
        os.environ.update(cpu_engine.environment({METHOD_VARIABLE: method}, 1, eager=True))
        for _ in range(2):
            patches.apply("server on CPUs")
        VllmConfig(device_config=DeviceConfig("cpu"), cache_config=CacheConfig(kv_cache_memory_bytes=1 << 26))
        return os.environ["VLLM_WORKER_MULTIPROC_METHOD"], os.environ["NUMEXPR_MAX_THREADS"]

    found, threads = run_in_fork(configure, "vLLM's configuration")
    assert found == method and int(threads) > 0, "the platform has run"
