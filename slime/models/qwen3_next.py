"""Qwen3-Next, experts: three layers of gated delta net to one of gated attention, and a shared expert with a gate."""

from __future__ import annotations

from slime.models.decoder import Decoder, Hf
from slime.models.family import Family
from slime.models.hybrid import (
    DELTA_NET,
    FLAGS,
    GATED_ATTENTION,
    HF_DELTA,
    MG_DELTA,
    SHARED_WIDTH,
    ByKeyHead,
    hybrid,
    rope,
)
from slime.models.layouts import Row
from slime.models.qwen2_moe import SHARED_WITH_GATE, experts
from slime.models.reading import only, read_decoder
from slime.models.rows import ENDS, EXPERTS, HEAD_NORMS, IGNORED, MLP, NORMS


def read(hf: Hf) -> Decoder:
    only(hf, attention_bias=False)
    hf = {**SHARED_WIDTH, **hf}
    return hybrid(hf, read_decoder(hf, qk_norm="head", rope=rope, experts=experts))


def predicted(hf: Hf) -> tuple[str, ...]:
    """The published files have layers of multi-token prediction that config.json does not mention."""
    return ("mtp.",)


IN_PROJ = Row(
    MG_DELTA + "in_proj.weight",
    (HF_DELTA + "in_proj_qkvz.weight", HF_DELTA + "in_proj_ba.weight"),
    ByKeyHead(parts=((0, 1, 2, 3), (4, 5)), by_head=True),
)

ROWS = (
    *(ENDS + NORMS + GATED_ATTENTION + HEAD_NORMS + DELTA_NET),
    IN_PROJ,
    *(MLP + EXPERTS + SHARED_WITH_GATE),
)

QWEN3_NEXT = Family(
    "qwen3_next",
    "Qwen3-Next, experts",
    "80B-A3B",
    ROWS,
    read,
    ignored=IGNORED,
    predicted=predicted,
    flags=FLAGS,
)
