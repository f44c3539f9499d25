"""Wrong families for the check of a family: each is Llama's with one change."""

from __future__ import annotations

from dataclasses import replace

from slime.models.decoder import Decoder, Hf
from slime.models.families.llama import LLAMA

SWAPPED = replace(
    LLAMA,
    rows=tuple(
        replace(row, hf=row.hf[::-1]) if row.megatron.endswith("linear_fc1.weight") else row
        for row in LLAMA.rows
    ),
)
"""Up is in the place of gate."""

_NORMS = {"input_layernorm": "post_attention_layernorm", "post_attention_layernorm": "input_layernorm"}
OTHER_NORMS = replace(
    LLAMA,
    rows=tuple(
        replace(
            row, hf=tuple(name.replace(name.split(".")[-2], _NORMS[name.split(".")[-2]]) for name in row.hf)
        )
        if row.hf[0].split(".")[-2] in _NORMS
        else row
        for row in LLAMA.rows
    ),
)


def read_rotary(hf: Hf) -> Decoder:
    decoder = LLAMA.read(hf)
    return replace(decoder, ropes=tuple(replace(rope, theta=2 * rope.theta) for rope in decoder.ropes))


ROTARY = replace(LLAMA, read=read_rotary)


def read_scale(hf: Hf) -> Decoder:
    return replace(LLAMA.read(hf), attention_scale=0.5)


SCALE = replace(LLAMA, read=read_scale)


def read_wide(hf: Hf) -> Decoder:
    decoder = LLAMA.read(hf)
    attention = replace(decoder.layers[0].attention, whole=7)
    return replace(decoder, layers=tuple(replace(layer, attention=attention) for layer in decoder.layers))


PLAN = replace(LLAMA, read=read_wide)
"""The plan counts 7 elements more per layer."""

LESS = replace(LLAMA, rows=tuple(row for row in LLAMA.rows if "final_layernorm" not in row.megatron))
"""The table has no row for the last norm."""
