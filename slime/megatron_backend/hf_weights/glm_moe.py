"""GLM-4.5 with routed experts: the rows of Qwen3, one row for a layer's shared experts, and the router's correction
bias. In Megatron, the bias is a buffer in fp32 for every dtype of the model. In files and engines, it is an ordinary
tensor."""

from __future__ import annotations

from slime.megatron_backend.hf_weights.base import Direct, Family, GateUp, Row
from slime.megatron_backend.hf_weights.qwen import HF, IGNORED, MG, ROWS
from slime.megatron_backend.hf_weights.qwen_moe import EXPERT_ROWS

_MG_SHARED, _HF_SHARED = MG + "mlp.shared_experts.", HF + "mlp.shared_experts."

_MORE = (
    Row(MG + "mlp.router.expert_bias", (HF + "mlp.gate.e_score_correction_bias",)),
    Row(
        _MG_SHARED + "linear_fc1.weight",
        (_HF_SHARED + "gate_proj.weight", _HF_SHARED + "up_proj.weight"),
        GateUp(),
    ),
    Row(_MG_SHARED + "linear_fc2.weight", (_HF_SHARED + "down_proj.weight",), Direct(axis=1)),
)

GLM4_MOE = Family(
    "glm4_moe",
    ROWS + EXPERT_ROWS + _MORE,
    qkv_bias="attention_bias",
    qk_norm="use_qk_norm",
    ignored=IGNORED,
    rotary_fraction=0.5,
)
