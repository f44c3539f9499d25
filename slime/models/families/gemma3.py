"""Gemma 3, text: GELU in the MLP, and norms that multiply by 1 + weight before and after attention and MLP. Five layers
with a sliding window precede each layer that sees all tokens. Both kinds of layer have their own rotary embedding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from slime.models.decoder import Decoder, Hf
from slime.models.family import Family
from slime.models.layouts import Row
from slime.models.reading import alternating_windows, need, only, read_decoder
from slime.models.rope import Rope, read_rope
from slime.models.rows import ATTENTION, ENDS, HEAD_NORMS, HF, IGNORED, MG, MLP


def ropes(hf: Hf, head_dim: int) -> tuple[Rope, Rope]:
    """Returns the rotary embeddings of (layers that see all tokens, layers with a window). Newer files have two records
    in `rope_parameters`. In older files, `rope_theta` and `rope_scaling` describe the first embedding and
    `rope_local_base_freq` the second."""
    both = hf.get("rope_parameters") or {}
    old = {"rope_theta": hf.get("rope_theta", 1e6), **(hf.get("rope_scaling") or {})}
    full = {"rope_theta": 1e6, **(both.get("full_attention") or old)}
    local = {"rope_theta": hf.get("rope_local_base_freq", 1e4), **(both.get("sliding_attention") or {})}
    return read_rope(hf, head_dim, whole=True, record=full), read_rope(hf, head_dim, whole=True, record=local)


def gemma(
    hf: Hf, pattern: int, *, qk_norm: str = "", rope: Callable[[Hf, int], Rope] | None = None
) -> Decoder:
    """Returns the decoder parts that Gemma 2 and 3 share. Raises ValueError for another activation, biases, or
    attention to later tokens."""
    need(hf, "query_pre_attn_scalar", "head_dim")
    only(hf, hidden_activation="gelu_pytorch_tanh", attention_bias=False, use_bidirectional_attention=False)
    windows = alternating_windows(hf, hf.get("sliding_window_pattern") or pattern)
    tied = {**hf, "tie_word_embeddings": hf.get("tie_word_embeddings", True)}
    decoder = read_decoder(
        tied, post_norms=True, activation="geglu", windows=windows, qk_norm=qk_norm, rope=rope
    )
    return replace(
        decoder,
        zero_centred=True,
        embedding_scale=hf["hidden_size"] ** 0.5,
        attention_scale=hf["query_pre_attn_scalar"] ** -0.5,
        attention_cap=hf.get("attn_logit_softcapping"),
        logit_cap=hf.get("final_logit_softcapping"),
    )


def read(hf: Hf) -> Decoder:
    decoder = gemma(hf, 6, qk_norm="head", rope=lambda hf, head_dim: ropes(hf, head_dim)[0])
    layers = tuple(replace(layer, rope=0 if layer.window is None else 1) for layer in decoder.layers)
    return replace(decoder, layers=layers, ropes=ropes(hf, decoder.head_dim))


NORMS = tuple(
    Row(f"{MG}{megatron}_layernorm.weight", (f"{HF}{name}_layernorm.weight",))
    for megatron, name in (
        ("input", "input"),
        ("post_self_attn", "post_attention"),
        ("pre_mlp", "pre_feedforward"),
        ("post_mlp", "post_feedforward"),
    )
)

GEMMA3 = Family(
    "gemma3_text",
    "Gemma 3, text",
    "270M, 1B",
    (*ENDS, *NORMS, *ATTENTION, *HEAD_NORMS, *MLP),
    read,
    ignored=IGNORED,
    flags=(("rotary_base", lambda hf: ropes(hf, hf["head_dim"])[0].theta),),
)
