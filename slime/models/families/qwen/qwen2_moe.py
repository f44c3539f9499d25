"""Qwen1.5-MoE and Qwen2-MoE: softmax experts, and a shared expert with a sigmoid gate per token."""

from __future__ import annotations

from dataclasses import replace

from slime.models.decoder import Decoder, Experts, Hf
from slime.models.family import Family
from slime.models.layouts import Row
from slime.models.reading import need, only, read_decoder, softmax_experts
from slime.models.rows import DENSE, EXPERTS, HF, IGNORED, MG, mlp_rows

_MG_SHARED, _HF_SHARED = MG + "mlp.shared_experts.", HF + "mlp.shared_expert"

SHARED_WITH_GATE = (
    *mlp_rows(_MG_SHARED, _HF_SHARED + "."),
    Row(_MG_SHARED + "gate_weight", (_HF_SHARED + "_gate.weight",)),
)


def experts(hf: Hf) -> Experts:
    need(hf, "shared_expert_intermediate_size")
    return replace(softmax_experts(hf), shared=hf["shared_expert_intermediate_size"], shared_gate=True)


def read(hf: Hf) -> Decoder:
    only(hf, use_sliding_window=False)
    return read_decoder(hf, qkv_bias=bool(hf.get("qkv_bias", True)), experts=experts)


QWEN2_MOE = Family(
    "qwen2_moe",
    "Qwen2-MoE, experts",
    "Qwen1.5-MoE-A2.7B, Qwen2-57B-A14B",
    DENSE + EXPERTS + SHARED_WITH_GATE,
    read,
    ignored=IGNORED,
)
