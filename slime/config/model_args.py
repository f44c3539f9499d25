"""Compares MODEL_ARGS with config.json. The checkpoint decides the shape, and the flags must agree with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from slime.config.fields import spelled
from slime.hf_config import expert_count, shared_expert_width, sigmoid_scores, sparse_layers

Reader = Callable[[dict[str, Any]], Any]


def _rotary(key: str, default: Any) -> Reader:
    """A rotary setting, from the newer `rope_parameters` table or from the top level."""

    def read(hf: dict[str, Any]) -> Any:
        table = hf.get("rope_parameters") or {}
        return table.get(key, hf.get(key, default))

    return read


def _has_qkv_bias(hf: dict[str, Any]) -> bool:
    biased: bool = hf.get("attention_bias", hf.get("model_type") in ("qwen2", "qwen2_moe"))
    return biased


def _scores(hf: dict[str, Any]) -> str | None:
    if not expert_count(hf):
        return None
    return "sigmoid" if sigmoid_scores(hf) else hf.get("scoring_func", "softmax")


READERS: dict[str, Reader] = {
    "num_layers": lambda hf: hf.get("num_hidden_layers"),
    "hidden_size": lambda hf: hf.get("hidden_size"),
    "ffn_hidden_size": lambda hf: hf.get("intermediate_size"),
    "num_attention_heads": lambda hf: hf.get("num_attention_heads"),
    "group_query_attention": lambda hf: hf.get("num_key_value_heads") != hf.get("num_attention_heads"),
    "num_query_groups": lambda hf: hf.get("num_key_value_heads", hf.get("num_attention_heads")),
    "kv_channels": lambda hf: hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"],
    "qk_layernorm": lambda hf: hf.get("use_qk_norm", str(hf.get("model_type")).startswith("qwen3")),
    "swiglu": lambda hf: hf.get("hidden_act") == "silu",
    "disable_bias_linear": lambda hf: not hf.get("mlp_bias", False),
    "add_qkv_bias": _has_qkv_bias,
    "normalization": lambda hf: "RMSNorm" if "rms_norm_eps" in hf else "LayerNorm",
    "norm_epsilon": lambda hf: hf.get("rms_norm_eps", hf.get("layer_norm_eps")),
    "position_embedding_type": lambda hf: "rope",
    "use_rotary_position_embeddings": lambda hf: True,
    "rotary_base": _rotary("rope_theta", 10000.0),
    "rotary_percent": _rotary("partial_rotary_factor", 1.0),
    "vocab_size": lambda hf: hf.get("vocab_size"),
    "max_position_embeddings": lambda hf: hf.get("max_position_embeddings"),
    "untie_embeddings_and_output_weights": lambda hf: not hf.get("tie_word_embeddings", False),
    "num_experts": lambda hf: expert_count(hf) or None,
    "moe_ffn_hidden_size": lambda hf: hf.get("moe_intermediate_size"),
    "moe_router_topk": lambda hf: hf.get("num_experts_per_tok"),
    "moe_layer_freq": lambda hf: [int(sparse) for sparse in sparse_layers(hf)],
    "moe_router_score_function": _scores,
    # config.json has no such setting for sigmoid scores, and slime's scripts set the flag
    "moe_router_pre_softmax": lambda hf: (
        sigmoid_scores(hf) or (expert_count(hf) > 0 and not hf.get("norm_topk_prob", False))
    ),
    "moe_router_enable_expert_bias": sigmoid_scores,
    "moe_router_num_groups": lambda hf: hf.get("n_group"),
    "moe_router_group_topk": lambda hf: hf.get("topk_group"),
    "moe_router_topk_scaling_factor": lambda hf: hf.get("routed_scaling_factor"),
    "moe_shared_expert_intermediate_size": lambda hf: shared_expert_width(hf) or None,
}
"""MODEL_ARG -> its value according to a Hugging Face config.json (all supported families are rotary)."""


def check_model_args(model_args: dict[str, Any], hf_config: dict[str, Any]) -> None:
    """ValueError with every MODEL_ARG that differs from the checkpoint's config.json, with both values.

    Only flags that the user gave are compared.
    """
    wrong = []
    for name, value in model_args.items():
        actual = READERS[name](hf_config)
        if name == "moe_layer_freq" and isinstance(value, int):
            value = [int(layer % value == 0) for layer in range(len(actual))]
        if actual != value:
            wrong.append(f"{spelled(name)} is {value}, config.json says {actual}")
    if wrong:
        raise ValueError(
            "MODEL_ARGS must agree with config.json of --hf-checkpoint, got "
            f"{'; '.join(wrong)}; correct or leave out these flags"
        )
