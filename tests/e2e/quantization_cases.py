"""Values of `quantization_config` as published checkpoints have them."""

from __future__ import annotations

from typing import Any

FP8: dict[str, Any] = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "weight_block_size": [128, 128],
}
"""DeepSeek-V3, DeepSeek-R1, and Qwen3's FP8 checkpoints."""
KIMI_IGNORED = [
    "lm_head",
    "re:.*self_attn.*",
    "re:.*shared_experts.*",
    r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
]


def with_int4(**weights: object) -> dict[str, Any]:
    """Returns the configuration of Kimi-K2-Thinking, with other values in its weights' arguments."""
    usual = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": usual | weights}},
    }


INT4 = with_int4()
FP8_ROWS: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"},
        }
    },
}
"""GLM's FP8 checkpoints."""


def with_fp8(**weights: object) -> dict[str, Any]:
    """Returns FP8_ROWS with other values for its weights."""
    group = FP8_ROWS["config_groups"]["group_0"]
    return FP8_ROWS | {"config_groups": {"group_0": group | {"weights": group["weights"] | weights}}}


def with_rounded_inputs(**weights: object) -> dict[str, Any]:
    """Returns FP8_ROWS with dynamic activations in fp8, which engines on CPUs need, and other values for its
    weights."""
    group = with_fp8(**weights)["config_groups"]["group_0"]
    inputs = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": True, "strategy": "token"}
    if weights:
        inputs |= {"strategy": "group", "group_size": 128}
    return FP8_ROWS | {"config_groups": {"group_0": group | {"input_activations": inputs}}}


COMPRESSED = {
    "rows": with_rounded_inputs(),
    "blocks": with_rounded_inputs(strategy="block", block_structure=[128, 128]),
}
"""FP8 of compressed-tensors that a dense engine on CPUs runs."""
