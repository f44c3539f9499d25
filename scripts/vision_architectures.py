"""Shapes of published models with vision tower, for plans: one row per model, with the source of its numbers."""

from __future__ import annotations

from typing import Any

from architecture import Architecture
from architecture_fields import deepseek_yarn, gemma3, gemma4, latent
from architectures import GEMMA3_VOCAB, HUB, QWEN_LARGE_VOCAB, QWEN_VOCAB

_IDS = {
    "image_token_id": 151655,
    "video_token_id": 151656,
    "vision_start_token_id": 151652,
    "vision_end_token_id": 151653,
}
_WINDOWS = {
    **{"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "patch_size": 14},
    **{"window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31], "tokens_per_second": 2},
}
"""The tower of Qwen2.5-VL."""

_SIGLIP = {
    **{"num_hidden_layers": 27, "hidden_size": 1152, "intermediate_size": 4304, "num_attention_heads": 16},
    **{"image_size": 896, "patch_size": 14, "vision_use_head": False},
}
"""The tower of Gemma 3."""


def _deep(hidden: int, ffn: int, depth: int, layers: list[int]) -> dict[str, Any]:
    """Returns a tower of Qwen3-VL, whose `layers` give rows to the first decoder layers."""
    return {
        **{"depth": depth, "hidden_size": hidden, "intermediate_size": ffn, "num_heads": 16},
        **{"patch_size": 16, "num_position_embeddings": 2304, "deepstack_visual_indexes": layers},
    }


def _axes(sections: list[int], *, alternating: bool) -> dict[str, Any]:
    return {"mrope_section": sections, **({"mrope_interleaved": True} if alternating else {})}


WITHOUT_TOWER = ("gemma-4-26b-a4b", "kimi-k2.5")
"""Models whose tower the trainer does not build."""

VISION_ARCHITECTURES: dict[str, Architecture] = {
    "qwen2.5-vl-7b": Architecture(
        *("qwen2_5_vl", 3584, 18944, 28, (28, 4), 128, QWEN_LARGE_VOCAB, 1e6, 128000, False),
        *("bfloat16", HUB.format("Qwen2.5-VL-7B-Instruct")),
        rotary=_axes([16, 24, 24], alternating=False),
        vision={**_IDS, "vision_config": {**_WINDOWS, "out_hidden_size": 3584}},
    ),
    "qwen3-vl-4b": Architecture(
        *("qwen3_vl", 2560, 9728, 36, (32, 8), 128, QWEN_VOCAB, 5e6, 262144, True),
        *("bfloat16", HUB.format("Qwen3-VL-4B-Instruct")),
        rotary=_axes([24, 20, 20], alternating=True),
        vision={
            **_IDS,
            "vision_config": {**_deep(1024, 4096, 24, [5, 11, 17]), "out_hidden_size": 2560},
        },
    ),
    "qwen3-vl-30b-a3b": Architecture(
        *("qwen3_vl_moe", 2048, 6144, 48, (32, 4), 128, QWEN_VOCAB, 5e6, 262144, False),
        *("bfloat16", HUB.format("Qwen3-VL-30B-A3B-Instruct")),
        experts=(128, 8, 768),
        rotary=_axes([24, 20, 20], alternating=True),
        vision={
            **_IDS,
            "vision_config": {**_deep(1152, 4304, 27, [8, 16, 24]), "out_hidden_size": 2048},
        },
    ),
    "gemma-3-4b": Architecture(
        *("gemma3", 2560, 10240, 34, (8, 4), 256, (262208, GEMMA3_VOCAB[1]), 1e6, 131072, True),
        *("bfloat16", "config.json of google/gemma-3-4b-it", None, None),
        gemma3(256, 1024, {"rope_type": "linear", "factor": 8.0}),
        vision={
            **{"image_token_index": 262144, "boi_token_index": 255999, "eoi_token_index": 256000},
            "mm_tokens_per_image": 256,
            "vision_config": _SIGLIP,
        },
    ),
    "gemma-4-26b-a4b": Architecture(
        *("gemma4", 2816, 2112, 30, (16, 8), 256, GEMMA3_VOCAB, 1e6, 262144, True),
        *("bfloat16", "copies of text_config of google/gemma-4-26B-A4B-it in public tests of other programs"),
        experts=(128, 8, 704),
        more=gemma4(1024, (2, 512), enable_moe_block=True, pad_token_id=0),
        vision={"vision_config": {}},
    ),
    "kimi-k2.5": Architecture(
        *("kimi_k25", 7168, 18432, 61, (64, 64), 64, (163840, 163584), 5e4, 262144, False),
        *("bfloat16", "public descriptions of moonshotai/Kimi-K2.5, not its config.json; in bfloat16"),
        experts=(384, 8, 2048),
        more=latent(1536, (128, 128), 1, 1, 2.827, rms_norm_eps=1e-5, model_type="deepseek_v3"),
        rotary=deepseek_yarn(64.0),
        vision={"vision_config": {}},
    ),
}
