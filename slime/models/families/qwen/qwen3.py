"""Qwen3, dense and with experts: RMSNorm on the heads of q and k. Experts have softmax scores."""

from __future__ import annotations

from slime.models.decoder import Decoder, Hf
from slime.models.family import Family
from slime.models.reading import only, read_decoder, softmax_experts
from slime.models.rows import DENSE, EXPERTS, HEAD_NORMS, IGNORED


def read(hf: Hf) -> Decoder:
    only(hf, use_sliding_window=False, attention_bias=False)
    return read_decoder(hf, qk_norm="head")


def read_moe(hf: Hf) -> Decoder:
    only(hf, use_sliding_window=False, attention_bias=False)
    return read_decoder(hf, qk_norm="head", experts=softmax_experts)


ROWS = DENSE + HEAD_NORMS

QWEN3 = Family("qwen3", "Qwen3, dense", "0.6B, 1.7B, 4B, 8B, 14B, 32B", ROWS, read, ignored=IGNORED)
QWEN3_MOE = Family(
    "qwen3_moe", "Qwen3, experts", "30B-A3B, 235B-A22B", ROWS + EXPERTS, read_moe, ignored=IGNORED
)
