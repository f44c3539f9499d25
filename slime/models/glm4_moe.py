"""GLM-4.5 with routed experts: sigmoid scores with a correction bias, shared experts, half of a head rotated."""

from __future__ import annotations

from slime.models.decoder import Decoder, Hf
from slime.models.family import Family
from slime.models.reading import only, read_decoder, sigmoid_experts
from slime.models.rope import Rope, read_rope
from slime.models.rows import DENSE, EXPERTS, HEAD_NORMS, IGNORED, ROUTER_BIAS, SHARED_EXPERT


def rope(hf: Hf, head_dim: int) -> Rope:
    """Published files may leave out the rotated half."""
    return read_rope(hf, head_dim, fraction=0.5)


def read(hf: Hf) -> Decoder:
    only(hf, use_sliding_window=False)
    return read_decoder(
        hf,
        qkv_bias=hf.get("attention_bias", False),
        qk_norm="head" if hf.get("use_qk_norm", False) else "",
        rope=rope,
        experts=sigmoid_experts,
    )


GLM4_MOE = Family(
    "glm4_moe",
    "GLM-4.5, experts",
    "Air, 355B",
    DENSE + HEAD_NORMS + EXPERTS + (ROUTER_BIAS, *SHARED_EXPERT),
    read,
    ignored=IGNORED,
)
