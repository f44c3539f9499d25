"""Fields of config.json that the rows of architectures.py add to the columns of the table."""

from __future__ import annotations

from typing import Any


def llama3(factor: float) -> dict[str, Any]:
    """The rotary scaling of Llama 3.1 and 3.2."""
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


GLM = {
    "attention_bias": True,
    "use_qk_norm": False,
    "rms_norm_eps": 1e-5,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
    "num_nextn_predict_layers": 0,  # the published models have one such layer; this script makes none
}
"""Fields of GLM-4.5-Air that are not columns of the table."""

GLM_LARGE = GLM | {"use_qk_norm": True, "first_k_dense_replace": 3, "routed_scaling_factor": 2.5}
"""Fields of GLM-4.5 (355B) that are not columns of the table."""


def latent(
    q: int | None, head: tuple[int, int], dense: int, shared: int, scale: float, **more: Any
) -> dict[str, Any]:
    """Fields of models with latent attention: width of the queries' latent vector, (dimensions of a key without
    position, of a value), dense layers, shared experts, scale of the experts' output. All published models have 512
    latent dimensions of keys and values, and 64 rotated dimensions. Their prediction layers are left out."""
    return {
        "q_lora_rank": q,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": head[0],
        "qk_rope_head_dim": 64,
        "v_head_dim": head[1],
        "first_k_dense_replace": dense,
        "n_shared_experts": shared,
        "routed_scaling_factor": scale,
        "n_group": 1,
        "topk_group": 1,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "num_nextn_predict_layers": 0,
        **more,
    }


def indexer(heads: int, topk: int = 2048) -> dict[str, Any]:
    """Fields of an indexer of sparse attention. All published models have 128 dimensions per head."""
    return {"index_n_heads": heads, "index_head_dim": 128, "index_topk": topk}


def deepseek_yarn(factor: float) -> dict[str, Any]:
    """The rotary scaling of DeepSeek-V3 and Kimi K2."""
    return {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32.0 if factor == 40.0 else 1.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    }


def delta(values: int, **more: Any) -> dict[str, Any]:
    """Fields of models with gated delta net layers: the number of heads of values. Every fourth layer has softmax
    attention."""
    return {
        "linear_num_key_heads": 16,
        "linear_num_value_heads": values,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        **more,
    }


_PARTS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}


def mamba(pattern: str, heads: int, size: int, state: int, groups: int, **more: Any) -> dict[str, Any]:
    """Fields of Nemotron's models with Mamba-2 layers: a letter per layer, the number of heads, their size, the size of
    B and C, and the number of groups."""
    return {
        "layers_block_type": [_PARTS[letter] for letter in pattern],
        "mamba_num_heads": heads,
        "mamba_head_dim": size,
        "ssm_state_size": state,
        "n_groups": groups,
        **more,
    }


GPT_OSS_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def olmo3(window: int, scaling: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    """Fields of OLMo 3 that are not columns of the table: the window, and the scaling of the rotary embedding of layers
    without a window."""
    both = {
        kind: {"rope_type": "default", "rope_theta": 5e5} for kind in ("full_attention", "sliding_attention")
    }
    both["full_attention"] |= scaling or {}
    return {"sliding_window": window, "rope_parameters": both, **more}


def gemma3(scalar: int, window: int, scaling: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    """Fields of Gemma 3 that are not columns of the table: `scalar` under the scores, the window, and the scaling of
    the rotary embedding of layers without a window."""
    ropes = {"full_attention": 1e6, "sliding_attention": 1e4}
    both = {kind: {"rope_type": "default", "rope_theta": theta} for kind, theta in ropes.items()}
    both["full_attention"] |= scaling or {}
    return {"query_pre_attn_scalar": scalar, "sliding_window": window, "rope_parameters": both, **more}


def gemma4(window: int, wide: tuple[int, int], **more: Any) -> dict[str, Any]:
    """Fields of Gemma 4 that are not columns of the table: the window, and (heads of keys, head size)
    of layers without a window."""
    both = {
        "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    return {
        "sliding_window": window,
        "num_global_key_value_heads": wide[0],
        "global_head_dim": wide[1],
        "attention_k_eq_v": True,
        "hidden_size_per_layer_input": 0,
        "final_logit_softcapping": 30.0,
        "rope_parameters": both,
        **more,
    }


def gemma2(scalar: int, window: int = 4096) -> dict[str, Any]:
    """Fields of Gemma 2 that are not columns of the table."""
    caps = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
    return {"query_pre_attn_scalar": scalar, "sliding_window": window, **caps}


MINIMAX = {"scoring_func": "sigmoid", "use_routing_bias": True}
HYBRID = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
"""Fields of our own models with gated delta net layers: vLLM's CPU kernel needs heads of 128."""
QWEN3_NEXT = HYBRID | {"shared_expert_intermediate_size": 128}
