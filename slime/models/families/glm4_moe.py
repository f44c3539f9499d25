"""GLM-4.5 with routed experts: sigmoid scores with a correction bias, shared experts, half of a head rotated."""

from __future__ import annotations

from slime.models.decoder import Decoder, Hf
from slime.models.family import Family
from slime.models.reading import only, read_decoder, sigmoid_experts, with_predictions
from slime.models.rope import Rope, read_rope
from slime.models.rows import (
    ATTENTION,
    ENDS,
    EXPERTS,
    HEAD_NORMS,
    IGNORED,
    MLP,
    NORMS,
    ROUTER_BIAS,
    SHARED_EXPERT,
    later_predictions,
)


def rope(hf: Hf, head_dim: int) -> Rope:
    """Returns the rotary embedding. Published files may omit the rotated half."""
    return read_rope(hf, head_dim, fraction=0.5)


def read(hf: Hf) -> Decoder:
    only(hf, use_sliding_window=False)
    decoder = read_decoder(
        hf,
        qkv_bias=hf.get("attention_bias", False),
        qk_norm="head" if hf.get("use_qk_norm", False) else "",
        rope=rope,
        experts=sigmoid_experts,
    )
    return with_predictions(hf, decoder)


LAYER = NORMS + ATTENTION + MLP + HEAD_NORMS + EXPERTS + (ROUTER_BIAS, *SHARED_EXPERT)

GLM4_MOE = Family(
    "glm4_moe",
    "GLM-4.5, experts",
    "Air, 355B",
    ENDS + LAYER,
    read,
    ignored=IGNORED,
    prediction=later_predictions(LAYER),
)
