"""MODEL_ARGS against config.json: the checkpoint decides the shape, the flags may only agree with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from slime.config.fields import spelled
from slime.hf_config import expert_count, sparse_layers

Reader = Callable[[dict[str, Any]], Any]


def _rotary(key: str, default: Any) -> Reader:
    """A rotary setting, from the newer `rope_parameters` table or from the top level."""

    def read(hf: dict[str, Any]) -> Any:
        table = hf.get("rope_parameters") or {}
        return table.get(key, hf.get(key, default))

    return read


def _has_qkv_bias(hf: dict[str, Any]) -> bool:
    return hf.get("attention_bias", hf.get("model_type") in ("qwen2", "qwen2_moe"))


READERS: dict[str, Reader] = {
    "num_layers": lambda hf: hf.get("num_hidden_layers"),
    "hidden_size": lambda hf: hf.get("hidden_size"),
    "ffn_hidden_size": lambda hf: hf.get("intermediate_size"),
    "num_attention_heads": lambda hf: hf.get("num_attention_heads"),
    "group_query_attention": lambda hf: hf.get("num_key_value_heads") != hf.get("num_attention_heads"),
    "num_query_groups": lambda hf: hf.get("num_key_value_heads", hf.get("num_attention_heads")),
    "kv_channels": lambda hf: hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"],
    "qk_layernorm": lambda hf: str(hf.get("model_type")).startswith("qwen3"),
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
    "moe_router_score_function": lambda hf: hf.get("scoring_func", "softmax" if expert_count(hf) else None),
    "moe_router_pre_softmax": lambda hf: expert_count(hf) > 0 and not hf.get("norm_topk_prob", False),
    "moe_shared_expert_intermediate_size": lambda hf: hf.get("shared_expert_intermediate_size"),
}
"""MODEL_ARG -> its value according to a Hugging Face config.json (all supported families are rotary)."""


def check_model_args(model_args: dict[str, Any], hf_config: dict[str, Any]) -> None:
    """Raise ValueError listing every MODEL_ARG that disagrees with the checkpoint's config.json, both shown.

    Only the flags that were given are compared; a bare flag that was left out claims nothing.
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
