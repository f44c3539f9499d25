"""Qwen2.5-VL: the decoder of Qwen2.5 behind a vision tower with windows. Image positions have three axes.

Older config.json files have the text model's settings at the top level, newer files have them in `text_config`.
"""

from __future__ import annotations

from dataclasses import replace

from slime.models.decoder import Decoder, Hf
from slime.models.family import Family
from slime.models.reading import need, only, read_decoder
from slime.models.rope import Rope, read_rope, rope_record
from slime.models.rows import DENSE, IGNORED
from slime.models.tower_rows import tower_rows, with_biases
from slime.models.vision import Vision, vision_record

FILES = "visual."
_BLOCK = "blocks.{b}."
TOWER = tower_rows(
    FILES,
    (
        "patch_embed.proj.weight",
        *(f"{_BLOCK}norm{number}.weight" for number in (1, 2)),
        *with_biases(*(f"{_BLOCK}{name}" for name in ("attn.qkv", "attn.proj"))),
        *with_biases(*(f"{_BLOCK}mlp.{name}_proj" for name in ("gate", "up", "down"))),
        "merger.ln_q.weight",
        *with_biases("merger.mlp.0", "merger.mlp.2"),
    ),
)


def rope(hf: Hf, head_dim: int) -> Rope:
    """Returns the rotary embedding. Older files call its kind "mrope", which is the default kind with three axes."""
    need(rope_record(hf), "mrope_section")
    record = dict(rope_record(hf))
    for key in ("type", "rope_type"):
        if record.get(key) == "mrope":
            record[key] = "default"
    return read_rope(hf, head_dim, whole=True, record=record)


def read_tower(hf: Hf) -> Vision:
    """Returns the record of the tower. Raises ValueError for a missing setting."""
    record = vision_record(hf)
    need(record, "depth", "intermediate_size", "num_heads", "patch_size", "window_size")
    need(hf, "image_token_id", "video_token_id")
    only(record, hidden_act="silu", out_hidden_size=hf["hidden_size"])
    patch, merge = record["patch_size"], record.get("spatial_merge_size") or 2
    side = record["window_size"] // patch // merge * merge
    return Vision(
        kind="qwen2_5_vl",
        settings=record,
        depth=record["depth"],
        hidden=record["hidden_size"],
        ffn=record["intermediate_size"],
        heads=record["num_heads"],
        out=record.get("out_hidden_size") or hf["hidden_size"],
        image_id=hf["image_token_id"],
        video_id=hf["video_token_id"],
        merge=merge,
        patch_values=(record.get("in_channels") or 3) * (record.get("temporal_patch_size") or 2) * patch**2,
        gated=True,
        window=side**2,
        whole_layers=len(record.get("fullatt_block_indexes") or ()),
        frames_per_second=float(record.get("tokens_per_second") or 2),
        files=(FILES,),
    )


def read(hf: Hf) -> Decoder:
    """Returns the decoder. Raises ValueError for sliding windows, which no published model of this family enables."""
    only(hf, use_sliding_window=False)
    return replace(read_decoder(hf, qkv_bias=True, rope=rope), vision=read_tower(hf))


QWEN2_5_VL = Family(
    "qwen2_5_vl",
    "Qwen2.5-VL, dense, images and videos",
    "3B, 7B, 32B, 72B",
    DENSE,
    read,
    ignored=IGNORED,
    tower=TOWER,
    module_prefix=("model.", "model.language_model."),
)
