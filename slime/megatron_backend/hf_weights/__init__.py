"""The weight table of each model family. To add a family, write its table file and add it here."""

from __future__ import annotations

from typing import Any

from slime.megatron_backend.hf_weights.base import Family
from slime.megatron_backend.hf_weights.glm_moe import GLM4_MOE
from slime.megatron_backend.hf_weights.qwen import QWEN2, QWEN3
from slime.megatron_backend.hf_weights.qwen_moe import QWEN3_MOE

FAMILIES: dict[str, Family] = {"qwen2": QWEN2, "qwen3": QWEN3, "qwen3_moe": QWEN3_MOE, "glm4_moe": GLM4_MOE}
"""`model_type` of config.json -> family."""


def family_for(hf_config: dict[str, Any]) -> Family:
    """The family of a parsed config.json. ValueError with the supported families for any other model."""
    model_type = hf_config.get("model_type")
    if model_type not in FAMILIES:
        raise ValueError(
            f"model_type in config.json must be one of {', '.join(sorted(FAMILIES))}, got {model_type!r}; "
            "a new family needs a table in slime/megatron_backend/hf_weights"
        )
    return FAMILIES[model_type]
