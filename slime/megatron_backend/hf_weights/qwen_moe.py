"""Qwen3 with routed experts: the rows of the dense family, the router, and two rows for all experts, by number.

A layer has the rows of an MLP or of experts. Expert E is `experts.E` in a file and `local_experts.E` in Megatron. The
numbers are equal if one expert-parallel rank has all experts.
"""

from __future__ import annotations

from slime.megatron_backend.hf_weights.base import Direct, Family, GateUp, Row
from slime.megatron_backend.hf_weights.qwen import HF, IGNORED, MG, ROWS

_MG_EXPERT, _HF_EXPERT = MG + "mlp.experts.local_experts.{e}.", HF + "mlp.experts.{e}."

EXPERT_ROWS = (
    Row(MG + "mlp.router.weight", (HF + "mlp.gate.weight",)),
    Row(
        _MG_EXPERT + "linear_fc1.weight",
        (_HF_EXPERT + "gate_proj.weight", _HF_EXPERT + "up_proj.weight"),
        GateUp(),
    ),
    Row(_MG_EXPERT + "linear_fc2.weight", (_HF_EXPERT + "down_proj.weight",), Direct(axis=1)),
)

QWEN3_MOE = Family("qwen3_moe", ROWS + EXPERT_ROWS, qkv_bias=False, qk_norm=True, ignored=IGNORED)
