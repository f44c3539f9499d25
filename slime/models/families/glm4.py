"""GLM-4 and GLM-Z1, dense: norms after attention and MLP too, and half of a head rotated in neighbouring pairs."""

from __future__ import annotations

from slime.models.decoder import Decoder, Hf
from slime.models.family import Family
from slime.models.layouts import Direct, GateUpTensor, Row
from slime.models.reading import read_decoder
from slime.models.rope import Rope, read_rope
from slime.models.rows import ATTENTION, ENDS, HF, IGNORED, MG, NORMS


def rope(hf: Hf, head_dim: int) -> Rope:
    """Returns the rotary embedding. Published files may omit the rotated half."""
    return read_rope(hf, head_dim, fraction=0.5, interleaved=True)


def read(hf: Hf) -> Decoder:
    return read_decoder(hf, qkv_bias=bool(hf.get("attention_bias", False)), post_norms=True, rope=rope)


ROWS = (
    *(ENDS + NORMS + ATTENTION),
    Row(MG + "post_self_attn_layernorm.weight", (HF + "post_self_attn_layernorm.weight",)),
    Row(MG + "post_mlp_layernorm.weight", (HF + "post_mlp_layernorm.weight",)),
    Row(MG + "mlp.linear_fc1.weight", (HF + "mlp.gate_up_proj.weight",), GateUpTensor()),
    Row(MG + "mlp.linear_fc2.weight", (HF + "mlp.down_proj.weight",), Direct(axis=1)),
)

GLM4 = Family("glm4", "GLM-4 and GLM-Z1, dense", "9B, 32B (0414)", ROWS, read, ignored=IGNORED)
