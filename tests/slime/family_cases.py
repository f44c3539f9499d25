"""Lists the tiny models on which every family is tested, one line per model. All family tests read this table."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

_SOFTMAX = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "norm_topk_prob": True}
_SIGMOID = {"n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 48}

_LATENT = {
    "tie_word_embeddings": False,  # vLLM has no tied heads for these families
    "num_key_value_heads": 4,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "routed_scaling_factor": 1.8,
    **_SIGMOID,
}

_KIMI = {
    **_LATENT,
    "q_lora_rank": 24,
    "first_k_dense_replace": 1,
    **{"n_group": 1, "topk_group": 1, "num_nextn_predict_layers": 0},
}

_SPARSE = {
    **_LATENT,
    "q_lora_rank": 24,
    "rms_norm_eps": 1e-6,
    "index_topk": 4,  # fewer than most sequences of the tests have
    "index_head_dim": 16,
    "index_n_heads": 16,  # with few heads, all products of a key may be negative, and such keys have the same score
}

_HYBRID = {
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "rms_norm_eps": 1e-4,  # the first tokens' outputs are tiny, and a norm would make their rounding large
}

_AXES = {"rope_type": "default", "rope_theta": 1e4}

_GEMMA4 = {
    "num_key_value_heads": 4,
    "head_dim": 32,
    "global_head_dim": 64,
    "num_global_key_value_heads": 2,
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0,
    "sliding_window": 6,
    "layer_types": ["sliding_attention", "full_attention"],
    "final_logit_softcapping": 3.0,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}

_GEMMA4_MOE = {"enable_moe_block": True, "num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 48}

_MAMBA = {
    **{"tie_word_embeddings": False, "bos_token_id": None, "eos_token_id": None, "head_dim": 32},
    **{"mamba_num_heads": 8, "mamba_head_dim": 24, "ssm_state_size": 16, "n_groups": 2, "chunk_size": 16},
    "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention"],
    "time_step_min": 1e-20,  # transformers raises time steps to this value, vLLM does not
}

TINY: dict[str, dict[str, Any]] = {
    "qwen2": {},
    "qwen3": {"head_dim": 32},  # not hidden / heads, as in the real Qwen3-0.6B
    "qwen3_moe": {"head_dim": 32, **_SOFTMAX},
    "glm4_moe": {"head_dim": 32, "attention_bias": True, **_SIGMOID},
    "llama": {},
    "mistral": {"head_dim": 32, "sliding_window": 6},
    "glm4": {"head_dim": 32, "pad_token_id": None},
    "minimax_m2": {"head_dim": 32, "rotary_dim": 16, "num_local_experts": 6, "num_experts_per_tok": 2},
    "gemma2": {
        "head_dim": 32,
        "query_pre_attn_scalar": 24,
        "sliding_window": 6,
        "pad_token_id": None,
        "attn_logit_softcapping": 2.0,  # small enough to change each score
        "final_logit_softcapping": 3.0,
        "attn_implementation": "eager",  # other implementations of transformers leave out the cap of scores
    },
    "gemma3_text": {
        "head_dim": 32,
        "query_pre_attn_scalar": 24,
        "sliding_window": 6,
        "layer_types": ["sliding_attention", "full_attention"],
        "pad_token_id": None,
    },
    "gemma3": {
        "head_dim": 32,
        "query_pre_attn_scalar": 24,
        "sliding_window": 6,  # fewer than the tokens of an image
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "pad_token_id": None,
    },
    "gemma4_text": _GEMMA4,
    "gemma4": {**_GEMMA4, "pad_token_id": 0},  # transformers puts it in the place of images
    "mimo": {"num_nextn_predict_layers": 1},
    "nemotron_h": _MAMBA,
    "olmo3": {
        "sliding_window": 6,
        "layer_types": ["sliding_attention", "full_attention"],
        "pad_token_id": None,
        "eos_token_id": None,
    },
    "gpt_oss": {
        "head_dim": 32,
        "sliding_window": 6,
        "intermediate_size": 32,
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
    },
    "qwen2_moe": {**_SOFTMAX, "shared_expert_intermediate_size": 80},
    "deepseek_v3": {
        **_LATENT,
        "q_lora_rank": 24,
        "first_k_dense_replace": 1,
        **{"n_routed_experts": 12, "num_experts_per_tok": 4, "n_group": 3, "topk_group": 2},
    },
    "kimi_k2": _KIMI,
    "kimi_k25": _KIMI,
    # With another rms_norm_eps, transformers and vLLM differ (test_latent.py).
    "glm4_moe_lite": {**_LATENT, "q_lora_rank": 24, "rms_norm_eps": 1e-6},
    "deepseek_v32": {
        **_SPARSE,
        "first_k_dense_replace": 1,
        **{"n_routed_experts": 12, "num_experts_per_tok": 4, "n_group": 3, "topk_group": 2},
    },
    "glm_moe_dsa": {**_SPARSE, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1},
    "qwen3_next": {**_SOFTMAX, "shared_expert_intermediate_size": 80, **_HYBRID},
    "qwen2_5_vl": {"rope_parameters": {**_AXES, "mrope_section": [2, 3, 3]}},
    "qwen3_vl": {
        "head_dim": 32,
        "rope_parameters": {**_AXES, "mrope_section": [6, 5, 5], "mrope_interleaved": True},
    },
    "qwen3_vl_moe": {
        "head_dim": 32,
        "rope_parameters": {**_AXES, "mrope_section": [6, 5, 5], "mrope_interleaved": True},
        **{name: value for name, value in _SOFTMAX.items() if name != "norm_topk_prob"},
    },
    "qwen3_5": _HYBRID,
    "qwen3_5_text": _HYBRID,
    "qwen3_5_moe": {**_SOFTMAX, "shared_expert_intermediate_size": 80, **_HYBRID},
    "qwen3_5_moe_text": {**_SOFTMAX, "shared_expert_intermediate_size": 80, **_HYBRID},
}
"""`model_type` -> the settings of its tiny model in addition to the common sizes (`megatron_cases.tiny_checkpoint`)."""

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
PLAIN = {"rope_type": "default", "rope_theta": 1e4}
MSCALE = {"mscale": 1.0, "mscale_all_dim": 1.0}
OLD = {"original_max_position_embeddings": 16}


_TOWER = {"hidden_size": 32, "intermediate_size": 64, "num_heads": 2}
MULTIMODAL: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": {**_TOWER, "depth": 2, "fullatt_block_indexes": [1], "window_size": 56},
    "qwen3_vl": {
        **_TOWER,
        "depth": 3,
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [0, 2],
    },
    "qwen3_vl_moe": {
        **_TOWER,
        "depth": 3,
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [0, 1, 2],
    },
    "qwen3_5": {**_TOWER, "depth": 1, "num_position_embeddings": 16},
    "qwen3_5_moe": {**_TOWER, "depth": 1, "num_position_embeddings": 16},
    "kimi_k25": {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_attention_heads": 2,
        "num_hidden_layers": 1,
        "pos_emb_height": 4,
        "pos_emb_width": 4,
    },
    "gemma4": {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_hidden_layers": 1,
        "patch_size": 4,
        "position_embedding_size": 16,
    },
    "gemma3": {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_attention_heads": 2,
        "num_hidden_layers": 2,
        "image_size": 24,
        "patch_size": 4,
        "vision_use_head": False,
    },
}
"""Families whose checkpoints also have a vision tower, each with the tower of its tiny model."""
IMAGE_ID, VIDEO_ID, VISION_START_ID, VISION_END_ID = 95, 96, 97, 98


def multimodal(kind: str, text: dict[str, Any]) -> dict[str, Any]:
    """Returns the config.json of a multimodal model with the text model `text`."""
    tied = text["tie_word_embeddings"]
    if kind == "kimi_k25":
        return {
            "text_config": {"model_type": "deepseek_v3", **text},
            "vision_config": MULTIMODAL[kind],
            "tie_word_embeddings": tied,
            "projection_hidden_size": MULTIMODAL[kind]["hidden_size"],
            "image_token_id": 99,  # outside the vocabulary: transformers has other embeddings for this token
        }
    if kind == "gemma4":
        ids = {f"{name}_token_id": 99 + i for i, name in enumerate(("image", "video", "audio"))}
        return {"text_config": text, "vision_config": MULTIMODAL[kind], "tie_word_embeddings": tied, **ids}
    if kind == "gemma3":
        return {
            "text_config": text,
            "vision_config": MULTIMODAL[kind],
            "tie_word_embeddings": tied,
            "mm_tokens_per_image": 9,
            "image_token_index": IMAGE_ID,
            "boi_token_index": VISION_START_ID,
            "eoi_token_index": VISION_END_ID,
        }
    return {
        "text_config": text,
        "vision_config": {**MULTIMODAL[kind], "out_hidden_size": text["hidden_size"]},
        "tie_word_embeddings": tied,
        "image_token_id": IMAGE_ID,
        "video_token_id": VIDEO_ID,
        "vision_start_token_id": VISION_START_ID,
        "vision_end_token_id": VISION_END_ID,
    }


BUILT_AS = {"mimo": "qwen2", "kimi_k2": "deepseek_v3"}
"""Families that transformers does not have, each with the family whose layers they have."""

PREDICTION = {
    "deepseek_v3": "model.layers.2.eh_proj.weight",
}
"""Families whose tiny model has a tensor of multi-token prediction, each with the tensor's name."""


@dataclass(frozen=True)
class FamilyCase:
    """A tiny model: its family, and its differences from the family's entry in `TINY`. `engine`: whether
    tests/e2e/engines/test_engine_families.py compares it with an engine; other families have separate tests.
    `dtype`: dtype of trainer and engine in that test."""

    kind: str
    shape: dict[str, Any] = field(default_factory=dict)
    engine: bool = False
    dtype: str = "float32"


CASES: dict[str, FamilyCase] = {
    "qwen2": FamilyCase("qwen2"),
    "qwen3-untied": FamilyCase("qwen3", {"tie_word_embeddings": False}),
    "qwen3-moe": FamilyCase("qwen3_moe", {"mlp_only_layers": [0]}),
    "glm4-moe": FamilyCase("glm4_moe", {"tie_word_embeddings": False, "first_k_dense_replace": 1}),
    "llama": FamilyCase("llama", {"rope_parameters": LLAMA3 | OLD}, engine=True),
    "llama-untied-yarn": FamilyCase(
        "llama", {"tie_word_embeddings": False, "rope_parameters": YARN | OLD}, engine=True
    ),
    "llama-bias": FamilyCase("llama", {"attention_bias": True}),
    "llama-linear": FamilyCase(
        "llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}
    ),
    "mistral": FamilyCase("mistral", engine=True),
    "mistral-untied-all": FamilyCase("mistral", {"tie_word_embeddings": False, "sliding_window": None}),
    "glm4": FamilyCase("glm4", {"tie_word_embeddings": False}, engine=True),
    "minimax-m2": FamilyCase("minimax_m2", {"tie_word_embeddings": False}, engine=True),
    "mimo": FamilyCase("mimo", {"tie_word_embeddings": False}, engine=True),
    "nemotron-h": FamilyCase("nemotron_h", engine=True),
    # vLLM has no experts without a gate on CPUs.
    "nemotron-3": FamilyCase(
        "nemotron_h",
        {
            "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"],
            **_SIGMOID,
            **{"moe_shared_expert_intermediate_size": 80, "routed_scaling_factor": 2.5},
        },
    ),
    "olmo3": FamilyCase(
        "olmo3",
        {
            "tie_word_embeddings": False,
            "rope_parameters": {"full_attention": YARN | OLD, "sliding_attention": PLAIN},
        },
        engine=True,
    ),
    "deepseek": FamilyCase("deepseek_v3", engine=True),
    # Moonlight computes queries from the hidden states. The published YaRN, where both factors are equal, changes the
    # scale.
    "deepseek-plain-queries": FamilyCase(
        "deepseek_v3",
        {"q_lora_rank": None, "v_head_dim": 32, "rope_parameters": YARN | OLD | MSCALE},
        engine=True,
    ),
    "kimi-k2": FamilyCase("kimi_k2", {"rope_parameters": YARN | OLD | MSCALE | {"mscale": 0.7}}, engine=True),
    "kimi-k2-5": FamilyCase("kimi_k25", engine=True),
    "glm4-moe-lite": FamilyCase("glm4_moe_lite", engine=True),
    "glm4-moe-lite-bias": FamilyCase("glm4_moe_lite", {"attention_bias": True}),
    "deepseek-v32": FamilyCase("deepseek_v32", {"rope_parameters": YARN | OLD | MSCALE}, engine=True),
    "glm-5": FamilyCase("glm_moe_dsa", engine=True),
    "glm-5-shared": FamilyCase(
        "glm_moe_dsa", {"num_hidden_layers": 4, "indexer_types": ["full", "shared", "full", "shared"]}
    ),
    "gpt-oss": FamilyCase("gpt_oss", {"tie_word_embeddings": False}, engine=True),
    "gemma2": FamilyCase("gemma2", engine=True),
    "gemma3": FamilyCase("gemma3_text", engine=True),
    "gemma4": FamilyCase("gemma4_text", engine=True),
    "gemma4-moe": FamilyCase("gemma4_text", _GEMMA4_MOE, engine=True),
    "gemma4-published": FamilyCase("gemma4", _GEMMA4_MOE, engine=True),
    "gemma3-vl": FamilyCase("gemma3"),
    "qwen2-moe": FamilyCase("qwen2_moe", {"norm_topk_prob": False, "mlp_only_layers": [0]}, engine=True),
    # vLLM's CPU kernels of gated delta nets only have bfloat16.
    "qwen3-next": FamilyCase(
        "qwen3_next", {"tie_word_embeddings": False, "mlp_only_layers": [0]}, True, "bfloat16"
    ),
    "qwen2-5-vl": FamilyCase("qwen2_5_vl"),
    "qwen3-vl": FamilyCase("qwen3_vl", {"tie_word_embeddings": False}),
    "qwen3-vl-moe": FamilyCase("qwen3_vl_moe", {"tie_word_embeddings": False, "num_hidden_layers": 4}),
    "qwen3-5": FamilyCase("qwen3_5", {}, True, "bfloat16"),
    "qwen3-5-text": FamilyCase("qwen3_5_text", {"tie_word_embeddings": False}, True, "bfloat16"),
    "qwen3-5-moe": FamilyCase("qwen3_5_moe", {"tie_word_embeddings": False}, True, "bfloat16"),
    "qwen3-5-moe-text": FamilyCase("qwen3_5_moe_text", {"tie_word_embeddings": False}, True, "bfloat16"),
}
"""Name -> tiny model."""

ENGINE_SHAPE: dict[str, Any] = {"hidden_size": 128, "max_position_embeddings": 512}
"""Sizes for vLLM's CPU kernels, which need heads of 32 and experts of 64 at least."""
_ENGINE_LATENT = {
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "moe_intermediate_size": 64,
    "n_routed_experts": 8,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
}
"""Settings for vLLM's latent attention on CPUs, whose kernel needs these two sizes. vLLM reads method and scores from
config.json. Published files have them, and transformers does not write them."""
_ENGINE_SPARSE = _ENGINE_LATENT | {"index_topk": 512, "index_head_dim": 128, "index_n_heads": 32}
"""Settings for vLLM's dense attention on CPUs (vime/vllm/cpu/sparse_attention.py): no sequence has more tokens than a
query sees. The kernels for GPUs need these heads of an indexer."""
_EXPERTS = {"moe_intermediate_size": 64, "num_experts": 8, "shared_expert_intermediate_size": 64}
_STATE = {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
ENGINE_EXPERTS: dict[str, dict[str, Any]] = {
    "minimax_m2": {
        "intermediate_size": 64,
        "num_local_experts": 8,
        "scoring_func": "sigmoid",
        "use_routing_bias": True,
    },
    "deepseek_v3": _ENGINE_LATENT | {"n_routed_experts": 12},
    "kimi_k2": _ENGINE_LATENT,
    "kimi_k25": _ENGINE_LATENT,
    "deepseek_v32": _ENGINE_SPARSE | {"n_routed_experts": 12},
    "glm_moe_dsa": _ENGINE_SPARSE,
    "glm4_moe_lite": _ENGINE_LATENT | {"first_k_dense_replace": 1},
    "gpt_oss": {"intermediate_size": 64, "num_local_experts": 8},
    "gemma4_text": {"moe_intermediate_size": 96},
    "gemma4": {"moe_intermediate_size": 96},
    "nemotron_h": {"moe_intermediate_size": 64, "n_routed_experts": 8},
    "qwen2_moe": _EXPERTS,
    "qwen3_next": {**_EXPERTS, **_STATE},
    "qwen3_5": _STATE,
    "qwen3_5_text": _STATE,
    "qwen3_5_moe": {**_EXPERTS, **_STATE},
    "qwen3_5_moe_text": {**_EXPERTS, **_STATE},
}


def engine_shape(case: FamilyCase) -> dict[str, Any]:
    """Returns a shape of a tiny model that vLLM can also serve."""
    return {**case.shape, **ENGINE_SHAPE, **ENGINE_EXPERTS.get(case.kind, {})}
