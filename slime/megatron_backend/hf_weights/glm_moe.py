"""GLM-4.5 with routed experts: the rows of Qwen3's, the shared experts of a layer as one, and the router's correction
bias: a buffer of Megatron's, fp32 whatever the model's dtype, and a tensor like any other in files and engines."""

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
