"""Gemma 4, dense: Gemma 3's layers with plain norms, a norm of values without weights, no scale of scores, and a frozen
factor of each layer's output.

Layers that see all tokens have wider and fewer heads, and their values are their keys before the norm. Their rotary
embedding turns a quarter of a head, with the frequencies of the whole head.
"""

from __future__ import annotations

from dataclasses import replace

from slime.models.decoder import Attention, Decoder, Hf, Layer, WideHeads
from slime.models.families.gemma3 import NORMS
from slime.models.family import Family
from slime.models.layouts import GroupedQueryKey, Row
from slime.models.reading import alternating_windows, need, only, read_decoder
from slime.models.rope import Rope, read_rope
from slime.models.rows import ATTENTION, ENDS, HEAD_NORMS, HF, IGNORED, MG, MLP

THETAS = {"full_attention": 1e6, "sliding_attention": 1e4}


def ropes(hf: Hf, head_dim: int, wide: int) -> tuple[Rope, Rope]:
    """Returns the rotary embeddings of (layers that see all tokens, layers with a window)."""
    both = hf.get("rope_parameters") or {}
    full = {
        "rope_type": "proportional",
        "partial_rotary_factor": 0.25,
        "rope_theta": THETAS["full_attention"],
    }
    local = {"rope_theta": THETAS["sliding_attention"]}
    return (
        read_rope(hf, wide, record=both.get("full_attention") or full),
        read_rope(hf, head_dim, whole=True, record=both.get("sliding_attention") or local),
    )


def wide_heads(hf: Hf, layers: tuple[Layer, ...]) -> WideHeads:
    """Returns the heads of the layers that see all tokens. Published files have two global settings, and transformers
    writes the settings of each such layer. Raises ValueError if these layers differ."""
    usual = {
        "head_dim": hf.get("global_head_dim") or 512,
        "num_key_value_heads": hf.get("num_global_key_value_heads") or hf["num_key_value_heads"],
    }
    each = {int(i): own for i, own in (hf.get("per_layer_config") or {}).items()}  # "05" in a file
    found = {
        (own["head_dim"], own["num_key_value_heads"])
        for i, layer in enumerate(layers)
        if layer.window is None
        for own in [{**usual, **each.get(i, {})}]
    }
    if len(found) != 1:
        raise ValueError(
            f"per_layer_config in config.json must give one size of heads to the layers without a window, got "
            f"{sorted(found)}; other layers are not supported for this family"
        )
    size, groups = found.pop()
    return WideHeads(groups, size)


def read(hf: Hf) -> Decoder:
    """Returns the decoder. Raises ValueError for the parts of the small models (embeddings per layer, keys and values
    of earlier layers) and for experts."""
    need(hf, "head_dim", "attention_k_eq_v", "hidden_size_per_layer_input")
    only(hf, hidden_activation="gelu_pytorch_tanh", attention_bias=False, attention_k_eq_v=True)
    only(hf, hidden_size_per_layer_input=0, num_kv_shared_layers=0, enable_moe_block=False)
    if hf.get("use_bidirectional_attention") == "all":
        only(hf, use_bidirectional_attention=None)
    decoder = read_decoder(
        {"tie_word_embeddings": True, **hf},
        post_norms=True,
        activation="geglu",
        windows=alternating_windows(hf, 6),
        qk_norm="head",
        rope=lambda hf, head_dim: ropes(hf, head_dim, head_dim)[1],
    )
    wide = wide_heads(hf, decoder.layers)
    q, kv = decoder.heads * wide.head_dim, wide.groups * wide.head_dim
    attention = replace(
        Attention.grouped(decoder.hidden, q, kv), params=decoder.hidden * (2 * q + kv), kept=4 * q + 3 * kv
    )
    layers = tuple(
        replace(layer, kind="keys_as_values", attention=attention)
        if layer.window is None
        else replace(layer, kind="normed_values", rope=1)
        for layer in decoder.layers
    )
    return replace(
        decoder,
        layers=layers,
        ropes=ropes(hf, decoder.head_dim, wide.head_dim),
        wide=wide,
        layer_scale=True,
        embedding_scale=hf["hidden_size"] ** 0.5,
        attention_scale=1.0,
        logit_cap=hf.get("final_logit_softcapping"),
    )


ROWS = (
    *(*ENDS, *NORMS, *ATTENTION, *HEAD_NORMS, *MLP),
    Row(
        MG + "self_attention.linear_qk.weight",
        tuple(f"{HF}self_attn.{x}_proj.weight" for x in "qk"),
        GroupedQueryKey(),
    ),
    Row(MG + "layer_scalar", (HF + "layer_scalar",)),
)

GEMMA4_TEXT = Family("gemma4_text", "Gemma 4, dense, without towers", "31B", ROWS, read, ignored=IGNORED)
