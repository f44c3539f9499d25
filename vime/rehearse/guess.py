"""Derives config.json from the model's flags of a script, for a model that is not on this machine."""

from __future__ import annotations

from slime.records.errors import FlagError
from vime.rehearse.changes import Flags

SIZES = {
    "num_hidden_layers": "num_layers",
    "hidden_size": "hidden_size",
    "intermediate_size": "ffn_hidden_size",
    "num_attention_heads": "num_attention_heads",
    "vocab_size": "vocab_size",
}
EXPERTS = {
    "num_experts": "num_experts",
    "num_experts_per_tok": "moe_router_topk",
    "moe_intermediate_size": "moe_ffn_hidden_size",
}


def guess_config(flags: Flags) -> dict[str, object]:
    """Returns config.json of a Qwen or Llama model. Raises ValueError for flags of other families."""
    missing = [f"--{name.replace('_', '-')}" for name in SIZES.values() if flags.value(name) is None]
    other = [name for name in ("multi_latent_attention", "spec", "attention_output_gate") if flags.has(name)]
    if missing or other:
        raise FlagError(
            "--hf-checkpoint",
            "have a config.json here, or flags of a Qwen or Llama model",
            f"{flags.value('hf_checkpoint')} with {', '.join(other) or 'no'} {', '.join(missing)}".strip(),
            "copy the model's config.json, a few kilobytes, to that path",
        )
    sizes = {key: flags.number(name, 0) for key, name in SIZES.items()}
    heads = sizes["num_attention_heads"]
    config: dict[str, object] = dict(sizes)
    config |= {
        "num_key_value_heads": flags.number("num_query_groups", heads),
        "head_dim": flags.number("kv_channels", sizes["hidden_size"] // heads),
        "rms_norm_eps": float(flags.value("norm_epsilon") or 1e-6),
        "rope_theta": float(flags.value("rotary_base") or 10000),
        "tie_word_embeddings": not flags.has("untie_embeddings_and_output_weights"),
        "max_position_embeddings": 32768,
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
    }
    family = "qwen3" if flags.has("qk_layernorm") else "qwen2" if flags.has("add_qkv_bias") else "llama"
    name = {"qwen3": "Qwen3ForCausalLM", "qwen2": "Qwen2ForCausalLM", "llama": "LlamaForCausalLM"}[family]
    if flags.has("num_experts"):
        family, name = "qwen3_moe", "Qwen3MoeForCausalLM"
        config |= {key: flags.number(flag, 0) for key, flag in EXPERTS.items()} | {"norm_topk_prob": True}
    return {"model_type": family, "architectures": [name], **config}
