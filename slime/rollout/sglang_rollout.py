"""Import path of slime plug-ins: see slime.rollout.vllm_rollout. The run's own engine generates."""

from slime.rollout.vllm_rollout import (
    GenerateState,
    abort,
    generate,
    generate_and_rm,
    generate_and_rm_group,
    generate_rollout,
    get_model_url,
)

__all__ = [
    "GenerateState",
    "abort",
    "generate",
    "generate_and_rm",
    "generate_and_rm_group",
    "generate_rollout",
    "get_model_url",
]
