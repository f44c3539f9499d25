"""OLMo 3, dense: norms of the outputs of attention and MLP instead of their inputs, and one norm for all heads of q and
one for all heads of k. Three layers with a sliding window precede each layer that sees all tokens. The rotary scaling
applies to the layers that see all tokens."""

from __future__ import annotations

from dataclasses import replace

from slime.models.decoder import Decoder, Hf
from slime.models.family import Family
from slime.models.layouts import Direct, Row
from slime.models.reading import alternating_windows, only, read_decoder
from slime.models.rope import Rope, read_rope
from slime.models.rows import ATTENTION, ENDS, HEAD_NORMS, HF, IGNORED, MG, MLP

THETA = 5e5
"""The rotary embedding's default base in transformers, for a config.json without a base. For the layers with a window,
it is also the base if `rope_theta` is at the top level of the file."""


def ropes(hf: Hf, head_dim: int) -> tuple[Rope, Rope]:
    """Returns the rotary embeddings of (layers that see all tokens, layers with a window). Newer files have two records
    in `rope_parameters`. In older files, `rope_theta` and `rope_scaling` describe the first embedding."""
    both = hf.get("rope_parameters") or {}
    old = {"rope_theta": hf.get("rope_theta", THETA), **(hf.get("rope_scaling") or {})}
    full = {"rope_theta": THETA, **(both.get("full_attention") or old)}
    local = {"rope_theta": THETA, **(both.get("sliding_attention") or {})}
    return read_rope(hf, head_dim, whole=True, record=full), read_rope(hf, head_dim, whole=True, record=local)


def read(hf: Hf) -> Decoder:
    only(hf, attention_bias=False)
    decoder = read_decoder(
        hf,
        qk_norm="projection",
        post_norms=True,
        windows=alternating_windows(hf, 4),
        rope=lambda hf, head_dim: ropes(hf, head_dim)[0],
    )
    layers = tuple(replace(layer, rope=0 if layer.window is None else 1) for layer in decoder.layers)
    return replace(decoder, pre_norms=False, layers=layers, ropes=ropes(hf, decoder.head_dim))


NORMS = tuple(
    Row(f"{MG}{megatron}_layernorm.weight", (f"{HF}{name}_layernorm.weight",))
    for megatron, name in (("post_self_attn", "post_attention"), ("post_mlp", "post_feedforward"))
)
OF_ALL_HEADS = tuple(Row(row.megatron, row.hf, Direct(axis=0)) for row in HEAD_NORMS)

OLMO3 = Family(
    "olmo3", "OLMo 3", "7B, 32B", (*ENDS, *NORMS, *ATTENTION, *OF_ALL_HEADS, *MLP), read, ignored=IGNORED
)
