"""Rows that the weight tables of several families share. Megatron's names are on the left, the names in HF files on the
right."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace

from slime.models.family import Prediction
from slime.models.layouts import Direct, GateUp, GroupedQkv, Layout, Row, Vocab

MG, HF = "decoder.layers.{i}.", "model.layers.{i}."
IGNORED = (HF + "self_attn.rotary_emb.inv_freq",)


def _qkv(suffix: str) -> Row:
    names = tuple(f"{HF}self_attn.{x}_proj.{suffix}" for x in "qkv")
    return Row(f"{MG}self_attention.linear_qkv.{suffix}", names, GroupedQkv())


ENDS = (
    Row("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), Vocab()),
    Row("decoder.final_layernorm.weight", ("model.norm.weight",)),
    Row("output_layer.weight", ("lm_head.weight",), Vocab()),
)
NORMS = (
    Row(MG + "input_layernorm.weight", (HF + "input_layernorm.weight",)),
    Row(MG + "pre_mlp_layernorm.weight", (HF + "post_attention_layernorm.weight",)),
)
ATTENTION = (
    _qkv("weight"),
    _qkv("bias"),
    Row(MG + "self_attention.linear_proj.weight", (HF + "self_attn.o_proj.weight",), Direct(axis=1)),
)
OUTPUT_BIAS = Row(MG + "self_attention.linear_proj.bias", (HF + "self_attn.o_proj.bias",))
HEAD_NORMS = (
    Row(MG + "self_attention.q_layernorm.weight", (HF + "self_attn.q_norm.weight",)),
    Row(MG + "self_attention.k_layernorm.weight", (HF + "self_attn.k_norm.weight",)),
)


def mlp_rows(
    megatron: str, hf: str, gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj"
) -> tuple[Row, ...]:
    """Returns the rows of a gated MLP. `megatron` and `hf` are the prefixes of its parameters' names in Megatron and in
    files."""
    return (
        Row(megatron + "linear_fc1.weight", (f"{hf}{gate}.weight", f"{hf}{up}.weight"), GateUp()),
        Row(megatron + "linear_fc2.weight", (f"{hf}{down}.weight",), Direct(axis=1)),
    )


MLP = mlp_rows(MG + "mlp.", HF + "mlp.")
DENSE = ENDS + NORMS + ATTENTION + MLP
"""Rows of a dense decoder without norms of queries and keys."""

EXPERTS = (
    Row(MG + "mlp.router.weight", (HF + "mlp.gate.weight",)),
    *mlp_rows(MG + "mlp.experts.local_experts.{e}.", HF + "mlp.experts.{e}."),
)
"""Rows of the experts. A layer has the rows of an MLP or of experts. Expert E is `experts.E` in a file and
`local_experts.E` in Megatron. The numbers are equal if one expert-parallel rank has all experts."""

ROUTER_BIAS = Row(MG + "mlp.router.expert_bias", (HF + "mlp.gate.e_score_correction_bias",))
"""In Megatron, the bias is a buffer in fp32 for every dtype of the model. In files and engines, the bias is an ordinary
tensor."""

SHARED_EXPERT = mlp_rows(MG + "mlp.shared_experts.", HF + "mlp.shared_experts.")

MTP = "mtp.layers.{i}."


def prediction_rows(
    layer: Iterable[Row], hf: str, embedding: str, state: str, product: str, last: str, layout: Layout
) -> tuple[Row, ...]:
    """Returns the rows of a layer of multi-token prediction. `layer` are the rows of the same kind of decoder layer,
    and `hf` is the prefix of the layer's names in files. The other arguments name the norms of embedding and state,
    their product with its layout, and the last norm."""
    names = {"enorm": embedding, "hnorm": state, "final_layernorm": last}
    return (
        *(Row(f"{MTP}{megatron}.weight", (f"{hf}{name}.weight",)) for megatron, name in names.items()),
        Row(f"{MTP}eh_proj.weight", (f"{hf}{product}.weight",), layout),
        *(
            replace(
                row,
                megatron=f"{MTP}transformer_layer.{row.megatron.removeprefix(MG)}",
                hf=tuple(hf + name.removeprefix(HF) for name in row.hf),
            )
            for row in layer
        ),
    )


def later_predictions(layer: Iterable[Row]) -> Prediction:
    """Returns the layers of multi-token prediction that follow the last decoder layer, with the names of DeepSeek-V3.
    `layer` are the rows of the same kind of decoder layer. Files may repeat embedding and head in every such layer."""
    rows = prediction_rows(
        layer,
        HF,
        embedding="enorm",
        state="hnorm",
        product="eh_proj",
        last="shared_head.norm",
        layout=Direct(axis=0),
    )
    copies = (
        (HF + "embed_tokens.weight", "model.embed_tokens.weight"),
        (HF + "shared_head.head.weight", "lm_head.weight"),
    )
    return Prediction(rows, copies=copies)


def under(prefix: str, rows: tuple[Row, ...]) -> tuple[Row, ...]:
    """Returns `rows` with `prefix` instead of "model." in the names of files."""
    return tuple(replace(row, hf=tuple(re.sub(r"^model\.", prefix, name) for name in row.hf)) for row in rows)
