"""Qwen3-Next, experts: three layers of gated delta net per layer of gated attention, and a shared expert with a
gate."""

from __future__ import annotations

from slime.models.decoder import Decoder, Hf
from slime.models.families.qwen.qwen2_moe import SHARED_WITH_GATE, experts
from slime.models.family import Family
from slime.models.hybrid import FLAGS, SHARED_WIDTH, hybrid_rows, read_hybrid
from slime.models.rows import EXPERTS, IGNORED, MLP


def read(hf: Hf) -> Decoder:
    return read_hybrid({**SHARED_WIDTH, **hf}, experts=experts)


def predicted(hf: Hf) -> tuple[str, ...]:
    """Returns the prefix of the layers of multi-token prediction, which the published files have but config.json does
    not mention."""
    return ("mtp.",)


ROWS = (
    *hybrid_rows(("qkvz", "ba"), ((0, 1, 2, 3), (4, 5)), by_head=True),
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
