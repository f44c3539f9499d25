"""Qwen3-VL, dense: the decoder of Qwen3 behind a vision tower. Rows of three of the tower's layers are added to the
outputs of the first decoder layers (DeepStack)."""

from __future__ import annotations

from dataclasses import replace

from slime.models.decoder import Decoder, Hf
from slime.models.families.qwen import qwen3
from slime.models.family import Family
from slime.models.reading import need, only, read_decoder
from slime.models.rope import Rope, read_rope, rope_record
from slime.models.rows import IGNORED, under
from slime.models.tower_rows import tower_rows, with_biases
from slime.models.vision import Vision, vision_record

FILES, TEXT = "model.visual.", "model.language_model."
_BLOCK = "blocks.{b}."
TOWER = tower_rows(
    FILES,
    (
        *with_biases("patch_embed.proj"),
        "pos_embed.weight",
        *with_biases(*(f"{_BLOCK}{name}" for name in ("norm1", "norm2", "attn.qkv", "attn.proj"))),
        *with_biases(*(f"{_BLOCK}mlp.linear_fc{number}" for number in (1, 2))),
        *with_biases(*(f"merger.{name}" for name in ("norm", "linear_fc1", "linear_fc2"))),
    ),
)
"""Rows of the tower, which Qwen3.5 has too."""
DEEP = tower_rows(
    FILES,
    with_biases(*(f"deepstack_merger_list.{{b}}.{name}" for name in ("norm", "linear_fc1", "linear_fc2"))),
)


def rope(hf: Hf, head_dim: int) -> Rope:
    """Returns the rotary embedding. The axes of image positions alternate."""
    only(rope_record(hf), mrope_interleaved=True)
    record = {key: value for key, value in rope_record(hf).items() if key != "mrope_interleaved"}
    return read_rope(hf, head_dim, whole=True, record=record, alternating=(24, 20, 20))


def read_tower(hf: Hf, kind: str) -> Vision:
    """Returns the record of the tower. Raises ValueError for a missing setting."""
    record = vision_record(hf)
    need(record, "depth", "hidden_size", "intermediate_size", "num_heads", "patch_size")
    need(hf, "image_token_id", "video_token_id")
    only(record, hidden_act="gelu_pytorch_tanh", out_hidden_size=hf["hidden_size"])
    deep = len(record.get("deepstack_visual_indexes") or ())
    frames, channels = record.get("temporal_patch_size") or 2, record.get("in_channels") or 3
    return Vision(
        kind=kind,
        settings=record,
        depth=record["depth"],
        hidden=record["hidden_size"],
        ffn=record["intermediate_size"],
        heads=record["num_heads"],
        out=hf["hidden_size"],
        image_id=hf["image_token_id"],
        video_id=hf["video_token_id"],
        merge=record.get("spatial_merge_size") or 2,
        patch_values=channels * frames * record["patch_size"] ** 2,
        mergers=1 + deep,
        deepstack=deep,
        frame_times="texts",
        files=(FILES,),
    )


def read(hf: Hf) -> Decoder:
    only(hf, use_sliding_window=False, attention_bias=False)
    decoder = read_decoder(hf, qk_norm="head", rope=rope)
    return replace(decoder, vision=read_tower(hf, "qwen3_vl"))


QWEN3_VL = Family(
    "qwen3_vl",
    "Qwen3-VL, dense, images and videos",
    "2B, 4B, 8B, 32B",
    under(TEXT, qwen3.ROWS),
    read,
    ignored=IGNORED,
    tower=TOWER + DEEP,
)
