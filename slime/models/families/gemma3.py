"""Gemma 3: GELU in the MLP, and norms that multiply by 1 + weight before and after attention and MLP. Five layers with
a sliding window precede each layer that sees all tokens. Both kinds of layer have their own rotary embedding.

Models from 4B on have SigLIP as vision tower. Every image has the same number of tokens, which attend to each other in
both directions.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from slime.models.decoder import Decoder, Hf
from slime.models.family import Family
from slime.models.layouts import Row
from slime.models.reading import alternating_windows, need, only, read_decoder
from slime.models.rope import Rope, read_rope
from slime.models.rows import ATTENTION, ENDS, HEAD_NORMS, HF, IGNORED, MG, MLP, under
from slime.models.tower_rows import tower_rows, with_biases
from slime.models.vision import PREFIX, Vision, vision_record


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

ROWS = (*ENDS, *NORMS, *ATTENTION, *HEAD_NORMS, *MLP)
FLAGS = (("rotary_base", lambda hf: ropes(hf, hf["head_dim"])[0].theta),)
GEMMA3_TEXT = Family("gemma3_text", "Gemma 3, text", "270M, 1B", ROWS, read, ignored=IGNORED, flags=FLAGS)

TEXT, TOWER, PROJECTOR = "language_model.model.", "vision_tower.vision_model.", "multi_modal_projector."
_BLOCK = "encoder.layers.{b}."
_ATTENTION = tuple(f"{_BLOCK}self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "out_proj"))
_OTHERS = tuple(_BLOCK + name for name in ("layer_norm1", "layer_norm2", "mlp.fc1", "mlp.fc2"))
_HEAD = ("attention.out_proj", "layernorm", "mlp.fc1", "mlp.fc2")
VISION_ROWS = (
    *tower_rows(
        TOWER,
        (
            "embeddings.position_embedding.weight",
            *with_biases("embeddings.patch_embedding", *_ATTENTION, *_OTHERS, "post_layernorm"),
        ),
        prefix=f"{PREFIX}vision_tower.",
    ),
    *tower_rows(
        PROJECTOR,
        ("mm_input_projection_weight", "mm_soft_emb_norm.weight"),
        prefix=f"{PREFIX}multi_modal_projector.",
    ),
)
POOLING_HEAD = (
    *("head.probe", "head.attention.in_proj_weight", "head.attention.in_proj_bias"),
    *with_biases(*(f"head.{name}" for name in _HEAD)),
)
"""Tensors of SigLIP's pooling head, which computes one vector per image. Gemma does not use them."""

ALIASES = (
    ("language_model.lm_head.", "lm_head."),
    ("model.language_model.", TEXT),
    (TOWER, TOWER),
    ("vision_tower.", TOWER),
    ("model." + TOWER, TOWER),
    ("model.vision_tower.", TOWER),
    ("model." + PROJECTOR, PROJECTOR),
)
"""Published files and transformers 4 and 5 have different prefixes. vLLM reads those of published files."""

DEFAULTS: dict[str, object] = {
    "vocab_size": 262208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
    "mm_tokens_per_image": 256,
    "image_token_index": 262144,
}
"""Values of transformers' Gemma3Config and Gemma3TextConfig. The published file of the 4B model has few fields."""


def read_tower(hf: Hf) -> Vision:
    """Returns the record of the tower. Raises ValueError for a missing setting, and for a number of tokens per image
    that is no square grid of the patches."""
    record = vision_record(hf)
    need(record, "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    need(record, "image_size", "patch_size")
    only(record, hidden_act="gelu_pytorch_tanh")
    side, tokens = record["image_size"] // record["patch_size"], hf["mm_tokens_per_image"]
    tokens_per_side = math.isqrt(tokens)
    if tokens_per_side**2 != tokens or not tokens or side % tokens_per_side:
        raise ValueError(
            f"mm_tokens_per_image in config.json must be the square of a divisor of {side}, the patches per side, got "
            f"{tokens}; download the checkpoint again"
        )
    return Vision(
        kind="gemma3",
        settings=record,
        depth=record["num_hidden_layers"],
        hidden=record["hidden_size"],
        ffn=record["intermediate_size"],
        heads=record["num_attention_heads"],
        out=hf["hidden_size"],
        image_id=hf.get("image_token_id") or hf["image_token_index"],
        merge=side // tokens_per_side,
        patch_values=(record.get("num_channels") or 3) * record["patch_size"] ** 2,
        tokens_per_image=tokens,
        pooled=True,
        axes=False,
        sees_whole_image=True,
        files=(TOWER, PROJECTOR),
        block_weight="vision_tower.encoder.layers.0.self_attn.q_proj.weight",
    )


def read_with_tower(hf: Hf) -> Decoder:
    hf = {**DEFAULTS, **hf}
    return replace(read(hf), vision=read_tower(hf))


GEMMA3 = Family(
    "gemma3",
    "Gemma 3, images",
    "4B, 12B, 27B",
    under(TEXT, ROWS),
    read_with_tower,
    defaults=DEFAULTS,
    ignored=(
        *(name.replace(HF, TEXT + HF.removeprefix("model.")) for name in IGNORED),
        *(TOWER + x for x in POOLING_HEAD),
    ),
    tower=VISION_ROWS,
    aliases=ALIASES,
    module_prefix=(TEXT, "model.language_model."),
    flags=FLAGS,
)
