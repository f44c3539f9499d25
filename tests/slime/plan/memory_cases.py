"""Provides a Qwen3-4B and the configuration of its run, for the tests of memory."""

from __future__ import annotations

from typing import Any

from architectures import ARCHITECTURES

from slime.config.schema import Config
from slime.rules.resolve import resolve
from vime.vllm.backend import engine_facts

QWEN3_4B = {"model_type": "qwen3", "hidden_act": "silu", **ARCHITECTURES["qwen3-4b"].config_fields()}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def config(**flags: Any) -> Config:
    """Returns a config with one rank and one engine on one GPU."""
    given = {
        "device": "cuda",
        "actor_num_gpus_per_node": 1,
        "colocate": True,
        "rollout_batch_size": 32,
        "n_samples_per_prompt": 8,
        "global_batch_size": 256,
        "rollout_max_response_len": 8192,
        "use_dynamic_batch_size": True,
        "max_tokens_per_gpu": 9216,
        "overrides": FULL,
        "engine_facts": engine_facts({"gpu_memory_utilization": 0.4}),
    }
    return resolve(given | flags)
