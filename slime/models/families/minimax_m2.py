"""MiniMax-M2, M2.1 and M2.5: experts in all layers with sigmoid scores and a correction bias, one norm for all heads of
q and one norm for all heads of k, and a part of a head rotated."""

from __future__ import annotations

from dataclasses import replace

from slime.models.decoder import Decoder, Experts, Hf
from slime.models.family import Family
from slime.models.layouts import Direct, Row
from slime.models.reading import expert_count, need, only, read_decoder
from slime.models.rope import Rope, read_rope
from slime.models.rows import ATTENTION, ENDS, HEAD_NORMS, HF, IGNORED, MG, NORMS, mlp_rows


def rope(hf: Hf, head_dim: int) -> Rope:
    """Returns the rotary embedding. Published files have the rotated dimensions as `rotary_dim`, transformers writes
    the fraction."""
    return read_rope(hf, head_dim, fraction=(hf.get("rotary_dim") or head_dim) / head_dim)


def experts(hf: Hf) -> Experts:
    """Returns the experts. `intermediate_size` is the width of an expert."""
    need(hf, "num_experts_per_tok")
    width = hf["intermediate_size"]
    return Experts(expert_count(hf), hf["num_experts_per_tok"], width, score="sigmoid", bias=True)


def read(hf: Hf) -> Decoder:
    """Returns the decoder. Raises ValueError for parts that the published models do not use: another score, shared
    experts, linear attention."""
    only(hf, scoring_func="sigmoid", use_routing_bias=True, shared_intermediate_size=0)
    only(hf, use_qk_norm=True, qk_norm_type="per_layer")
    if any(kind != 1 for kind in hf.get("attn_type_list") or ()):
        raise ValueError(
            f"attn_type_list in config.json must be 1 for each layer, got {hf['attn_type_list']}; linear attention is "
            "not supported for this family"
        )
    decoder = read_decoder(hf, qk_norm="projection", rope=rope, experts=experts)
    return replace(decoder, layers=tuple(replace(layer, sparse=True) for layer in decoder.layers))


def predicted(hf: Hf) -> tuple[str, ...]:
    """Returns the prefixes of the modules of multi-token prediction, which follow the last layer."""
    depth = hf["num_hidden_layers"]
    return tuple(f"model.layers.{n}." for n in range(depth, depth + (hf.get("num_mtp_modules") or 0)))


_MG_MOE, _HF_MOE = MG + "mlp.", HF + "block_sparse_moe."

ROWS = (
    *(ENDS + NORMS + ATTENTION),
    *(Row(row.megatron, row.hf, Direct(axis=0)) for row in HEAD_NORMS),
    Row(_MG_MOE + "router.weight", (_HF_MOE + "gate.weight",)),
    Row(_MG_MOE + "router.expert_bias", (_HF_MOE + "e_score_correction_bias",)),
    *mlp_rows(_MG_MOE + "experts.local_experts.{e}.", _HF_MOE + "experts.{e}.", "w1", "w3", "w2"),
)

MINIMAX_M2 = Family(
    "minimax_m2",
    "MiniMax-M2, experts",
    "M2, M2.1, M2.5 230B-A10B",
    ROWS,
    read,
    ignored=IGNORED,
    predicted=predicted,
)
