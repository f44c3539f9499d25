"""Makes config.json of a tiny model from that of a model: the same family, kinds of layers and switches."""

from __future__ import annotations

from collections.abc import Mapping

from slime.config.fields import Values
from slime.models.decoder import Hf

HEADS, EXPERTS, HIDDEN = 4, 8, 128
CONTEXT = 4096
SIZES: dict[str, int] = {
    "hidden_size": HIDDEN,
    "intermediate_size": 128,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "head_dim": 32,
    "num_attention_heads": HEADS,
    "global_head_dim": 64,
    "query_pre_attn_scalar": 32,
    "num_global_key_value_heads": 2,
    "rotary_dim": 16,
    "sliding_window": 64,
    "q_lora_rank": 32,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 64,
    "v_head_dim": 16,
    "index_head_dim": 128,
    "index_n_heads": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "mamba_num_heads": 8,
    "mamba_head_dim": 32,
    "ssm_state_size": 32,
    "n_groups": 2,
    "num_experts": EXPERTS,
    "n_routed_experts": EXPERTS,
    "num_local_experts": EXPERTS,
    "max_position_embeddings": CONTEXT,
    "max_window_layers": 2,
    "hidden_size_per_layer_input": 0,
}
"""Setting -> its largest value in the tiny model. A setting that a model leaves out, or sets to None, stays.

vLLM's kernels for CPUs need the widths of latent, linear and indexed attention, and heads of 32."""
TOWER = {
    **{"hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "num_attention_heads": 2, "depth": 2},
    **{"num_hidden_layers": 2, "num_position_embeddings": 16, "out_hidden_size": HIDDEN},
}
LATENT = {"num_key_value_heads": HEADS, "head_dim": 64}
"""Settings of a model with latent attention. Its head has the width of the rotary part."""
PREDICTION = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules")
"""Settings of multi-token prediction. The tiny model has no such layers."""


def shrink_config(config: Hf, layers: int, vocab: int | None) -> Values:
    """Returns config.json of the tiny model with `layers` layers, or a few more if the kinds of layers need them.

    `vocab` is the vocabulary's size if the tokenizer is made, or None for the model's own.
    """
    text = config.get("text_config")
    if isinstance(text, Mapping):
        shrunk = dict(config) | {"text_config": _shrink_text(text, layers, vocab)}
        if isinstance(config.get("vision_config"), Mapping):
            shrunk["vision_config"] = _shrink_tower(config["vision_config"])
        return _without_quantization(shrunk)
    return _without_quantization(_shrink_text(config, layers, vocab))


def _shrink_tower(tower: Hf) -> Values:
    """Returns the tower with two layers, or three if the model reads layers in between."""
    tiny = dict(tower) | {
        name: min(int(tower[name]), most) for name, most in TOWER.items() if isinstance(tower.get(name), int)
    }
    if isinstance(tower.get("deepstack_visual_indexes"), list):
        tiny["deepstack_visual_indexes"] = [0, 1]
    if isinstance(tower.get("fullatt_block_indexes"), list):
        tiny["fullatt_block_indexes"] = [1]
    return tiny


def _without_quantization(config: Values) -> Values:
    return {name: value for name, value in config.items() if name != "quantization_config"}


def _shrink_text(config: Hf, layers: int, vocab: int | None) -> Values:
    tiny = dict(config)
    for name, most in SIZES.items():
        if isinstance(tiny.get(name), int) and tiny[name]:
            tiny[name] = min(tiny[name], most)
    kept = int(config.get("num_attention_heads") or HEADS)
    shared = int(config.get("num_key_value_heads") or kept)
    tiny["num_key_value_heads"] = HEADS if shared == kept else 2
    if config.get("kv_lora_rank") is not None:
        tiny |= LATENT
    if tiny.get("index_topk"):
        tiny["index_topk"] = CONTEXT  # on a CPU, vLLM's sparse attention sees all tokens
    if "first_k_dense_replace" in tiny:
        tiny["first_k_dense_replace"] = min(int(tiny["first_k_dense_replace"] or 0), 1)
    tiny["num_experts_per_tok"] = min(int(config.get("num_experts_per_tok") or 0), 2) or None
    for name in ("n_group", "topk_group"):
        if isinstance(tiny.get(name), int):
            tiny[name] = min(tiny[name], 2 if name == "n_group" else 1)
    tiny |= {name: 0 for name in PREDICTION if name in tiny}
    for name in ("rope_parameters", "rope_scaling"):
        if isinstance(tiny.get(name), Mapping) and "mrope_section" in tiny[name]:
            tiny[name] = {**tiny[name], "mrope_section": _share_half(tiny)}
    return _set_layers(tiny, config, layers) | _vocabulary(tiny, vocab)


def _share_half(tiny: Hf) -> list[int]:
    """Returns the rotary sections of time, height and width: half a head in all."""
    half = int(
        int(tiny.get("head_dim") or HIDDEN // HEADS) * float(tiny.get("partial_rotary_factor") or 1) / 2
    )
    return [half - 2 * (half // 3), half // 3, half // 3]


def _vocabulary(tiny: Hf, vocab: int | None) -> Values:
    """Returns the ids of the made tokenizer, or nothing for the model's own tokenizer."""
    if vocab is None:
        return {}
    from vime.testing.tiny_model import BYTES, SPECIAL

    named = {"bos_token_id": None, "eos_token_id": "<|im_end|>", "pad_token_id": "<|endoftext|>"}
    ids = {key: token and BYTES + SPECIAL.index(token) for key, token in named.items()}
    return {"vocab_size": vocab, **ids}


def _shorten(kinds: list[object], layers: int) -> list[object]:
    """Returns one entry per layer: every kind once, and then the last one again, as after the first dense layers."""
    if not all(isinstance(kind, str) for kind in kinds):
        return [kinds[i % len(kinds)] for i in range(layers)]
    distinct = list(dict.fromkeys(kinds))
    return [distinct[min(i, len(distinct) - 1)] for i in range(layers)]


def _set_layers(tiny: Values, config: Hf, layers: int) -> Values:
    """Sets the number of layers so that every kind of layer occurs, and lists one kind per layer."""
    kinds = config.get("layer_types")
    if isinstance(kinds, list) and kinds:
        distinct = list(dict.fromkeys(kinds))
        count = max(layers, len(distinct))
        count += -count % len(distinct)
        tiny["layer_types"] = [distinct[i % len(distinct)] for i in range(count)]
        if tiny.get("full_attention_interval"):
            tiny["full_attention_interval"] = len(distinct)
        layers = count
    elif tiny.get("full_attention_interval"):
        tiny["full_attention_interval"] = 2
    for name in ("layers_block_type", "hybrid_override_pattern"):
        if parts := config.get(name):  # a list, or a text with a letter per layer
            distinct = list(dict.fromkeys(parts))
            layers = max(layers, len(distinct))
            chosen = [distinct[i % len(distinct)] for i in range(layers)]
            tiny[name] = chosen if isinstance(parts, list) else "".join(chosen)
    depth = config.get("num_hidden_layers")
    for name, value in tiny.items():
        if name == "mlp_only_layers":
            tiny[name] = [i for i in value or [] if i < layers]
        elif name != "layer_types" and isinstance(value, list) and len(value) == depth:
            tiny[name] = _shorten(value, layers)
    tiny["num_hidden_layers"] = layers
    return {name: value for name, value in tiny.items() if name != "num_experts_per_tok" or value}
