"""Compares MODEL_ARGS with config.json. The checkpoint decides the shape, and the flags must agree with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from slime.config.fields import spelled
from slime.models import Experts, decoder_of, family_for

Reader = Callable[[dict[str, Any]], Any]


def _rotary(key: str, default: Any) -> Reader:
    """A rotary setting, from the newer `rope_parameters` table or from the top level."""

    def read(hf: dict[str, Any]) -> Any:
        table = hf.get("rope_parameters") or {}
        return table.get(key, hf.get(key, default))

    return read


def _of_experts(read: Callable[[Experts], Any], dense: Any = None) -> Reader:
    """A setting of the experts, or `dense` for a model without experts."""

    def of(hf: dict[str, Any]) -> Any:
        experts = decoder_of(hf).experts
        return dense if experts is None else read(experts)

    return of


READERS: dict[str, Reader] = {
    "num_layers": lambda hf: hf.get("num_hidden_layers"),
    "hidden_size": lambda hf: hf.get("hidden_size"),
    "ffn_hidden_size": lambda hf: hf.get("intermediate_size"),
    "num_attention_heads": lambda hf: hf.get("num_attention_heads"),
    "group_query_attention": lambda hf: hf.get("num_key_value_heads") != hf.get("num_attention_heads"),
    "num_query_groups": lambda hf: hf.get("num_key_value_heads", hf.get("num_attention_heads")),
    "kv_channels": lambda hf: hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"],
    "qk_layernorm": lambda hf: bool(decoder_of(hf).qk_norm),
    "swiglu": lambda hf: hf.get("hidden_act") == "silu",
    "disable_bias_linear": lambda hf: not hf.get("mlp_bias", False),
    "add_qkv_bias": lambda hf: decoder_of(hf).qkv_bias,
    "normalization": lambda hf: "RMSNorm" if "rms_norm_eps" in hf else "LayerNorm",
    "norm_epsilon": lambda hf: hf.get("rms_norm_eps", hf.get("layer_norm_eps")),
    "position_embedding_type": lambda hf: "rope",
    "use_rotary_position_embeddings": lambda hf: True,
    "rotary_base": _rotary("rope_theta", 10000.0),
    "rotary_percent": _rotary("partial_rotary_factor", 1.0),
    "vocab_size": lambda hf: hf.get("vocab_size"),
    "max_position_embeddings": lambda hf: hf.get("max_position_embeddings"),
    "untie_embeddings_and_output_weights": lambda hf: not hf.get("tie_word_embeddings", False),
    "num_experts": _of_experts(lambda experts: experts.count),
    "moe_ffn_hidden_size": _of_experts(lambda experts: experts.width),
    "moe_router_topk": _of_experts(lambda experts: experts.topk),
    "moe_layer_freq": lambda hf: [int(sparse) for sparse in decoder_of(hf).sparse],
    "moe_router_score_function": _of_experts(lambda experts: experts.score),
    # config.json has no such setting for sigmoid scores, and slime's scripts set the flag
    "moe_router_pre_softmax": _of_experts(lambda e: e.score == "sigmoid" or not e.normalised, False),
    "moe_router_enable_expert_bias": _of_experts(lambda experts: experts.bias, False),
    "moe_router_num_groups": lambda hf: hf.get("n_group"),
    "moe_router_group_topk": lambda hf: hf.get("topk_group"),
    "moe_router_topk_scaling_factor": lambda hf: hf.get("routed_scaling_factor"),
    "moe_shared_expert_intermediate_size": _of_experts(lambda experts: experts.shared or None),
}
"""MODEL_ARG -> its value according to a Hugging Face config.json (all supported families are rotary).
`Family.flags` has those that only a family knows."""


def check_model_args(model_args: dict[str, Any], hf_config: dict[str, Any]) -> None:
    """ValueError with every MODEL_ARG that differs from the checkpoint's config.json, with both values.

    Only flags that the user gave are compared.
    """
    own, wrong = dict(family_for(hf_config).flags), []
    for name, value in model_args.items():
        actual = own.get(name, READERS[name])(hf_config)
        if name == "moe_layer_freq" and isinstance(value, int):
            value = [int(layer % value == 0) for layer in range(len(actual))]
        if actual != value:
            wrong.append(f"{spelled(name)} is {value}, config.json says {actual}")
    if wrong:
        raise ValueError(
            "MODEL_ARGS must agree with config.json of --hf-checkpoint, got "
            f"{'; '.join(wrong)}; correct or leave out these flags"
        )
