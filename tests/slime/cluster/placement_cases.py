"""Provides the configuration fields that placement reads. The placement tests change them."""

from __future__ import annotations

from typing import Any

from slime.config import Config
from slime.config.sections.engine import EngineFacts


def placement_config(device: str, **flags: Any) -> Config:
    """Returns a config with one trainer rank and one engine, each on its own device."""
    defaults = {
        "actor_num_nodes": 1,
        "actor_num_gpus_per_node": 1,
        "rollout_num_gpus": 1,
        "rollout_num_gpus_per_engine": 1,
        "rollout_engines_per_gpu": 1,
        "num_gpus_per_node": 8,
        "colocate": False,
        "device": device,
        "debug_train_only": False,
        "debug_rollout_only": False,
        "tensor_model_parallel_size": 1,
        "nvlink_domain_size": None,
        "engine_facts": EngineFacts(),
        "advantage_estimator": "grpo",
        "critic_devices": "auto",
        "critic_num_gpus_per_node": None,
    }
    assert set(flags) <= set(defaults)
    return Config.from_flat({**defaults, **flags})


def with_teachers(config: Config, *sources: str, gpus: int, per_engine: int = 1) -> Config:
    """Returns the same run with a teacher for each source."""
    return config.with_values(
        opd_type="vllm",
        opd_teacher_model=[f"{source}=DIR" for source in sources],
        opd_teacher_num_gpus=gpus,
        opd_teacher_num_gpus_per_engine=per_engine,
    )
