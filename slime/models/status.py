"""Where each family was run. `vime models` prints this record, and docs/models.md is checked against it."""

from __future__ import annotations

from dataclasses import dataclass

PLANNED = "planned"
"""The flags are accepted, and the family was never run there."""


@dataclass(frozen=True)
class Status:
    """`cpu`: what ran on CPUs. `h200`: what ran on an H200. Each is PLANNED or names the model that ran."""

    cpu: str = PLANNED
    h200: str = PLANNED


STATUS: dict[str, Status] = {
    "qwen2": Status(cpu="tiny model and Qwen2.5-0.5B"),
    "qwen3": Status(cpu="tiny model", h200="4B, random weights"),
    "qwen3_moe": Status(cpu="tiny model", h200="30B-A3B, 6 of 48 layers, random weights"),
    "glm4_moe": Status(cpu="tiny model", h200="Air, 2 of 46 layers, random weights"),
    "llama": Status(cpu="tiny model"),
    "mistral": Status(cpu="tiny model"),
    "glm4": Status(cpu="tiny model"),
    "minimax_m2": Status(cpu="tiny model"),
    "mimo": Status(cpu="tiny model"),
    "qwen2_moe": Status(cpu="tiny model"),
    "gemma2": Status(cpu="tiny model"),
    "gemma3_text": Status(cpu="tiny model"),
    "gpt_oss": Status(cpu="tiny model"),
    "deepseek_v3": Status(cpu="tiny model"),
    "kimi_k2": Status(cpu="tiny model"),
    "glm4_moe_lite": Status(cpu="tiny model"),
    "qwen3_next": Status(cpu="tiny model, bf16 engine"),
    "qwen3_5": Status(cpu="tiny model, bf16 engine"),
    "qwen3_5_text": Status(cpu="tiny model, bf16 engine"),
    "qwen3_5_moe": Status(cpu="tiny model, bf16 engine"),
    "qwen3_5_moe_text": Status(cpu="tiny model, bf16 engine"),
}
"""`model_type` -> status. A family without an entry is planned."""
