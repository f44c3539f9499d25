"""Gemma 4: Gemma 3's layers with plain norms, a norm of values without weights, no scale of scores, and a frozen factor
of each layer's output.

Layers that see all tokens have wider and fewer heads, and their values are their keys before the norm. Their rotary
embedding turns a quarter of a head, with the frequencies of the whole head. In models with experts, each layer has an
MLP and experts in parallel, and files stack the experts in gate_up_proj [E, 2 F, H] and down_proj [E, H, F].

The trainer does not build the towers of published checkpoints. An export copies their tensors from the checkpoint.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from slime.models.decoder import Attention, Decoder, Experts, Hf, Layer, WideHeads
from slime.models.families.gemma3 import NORMS
from slime.models.families.qwen.qwen3_vl_moe import ExpertTensors, stacked
from slime.models.family import Family
from slime.models.layouts import Direct, GateUpTensor, GroupedQueryKey, Row
from slime.models.quantized.quantized_checkpoint import dequantized
from slime.models.reading import alternating_windows, expert_count, need, only, read_decoder
from slime.models.rope import Rope, read_rope
from slime.models.rows import ATTENTION, ENDS, HEAD_NORMS, HF, IGNORED, MG, MLP, mlp_rows, under
from slime.models.slices import Tensors

THETAS = {"full_attention": 1e6, "sliding_attention": 1e4}


def ropes(hf: Hf, head_dim: int, wide: int) -> tuple[Rope, Rope]:
    """Returns the rotary embeddings of (layers that see all tokens, layers with a window)."""
    both = hf.get("rope_parameters") or {}
    full = {
        "rope_type": "proportional",
        "partial_rotary_factor": 0.25,
        "rope_theta": THETAS["full_attention"],
    }
    local = {"rope_theta": THETAS["sliding_attention"]}
    return (
        read_rope(hf, wide, record=both.get("full_attention") or full),
        read_rope(hf, head_dim, whole=True, record=both.get("sliding_attention") or local),
    )


def wide_heads(hf: Hf, layers: tuple[Layer, ...]) -> WideHeads:
    """Returns the heads of the layers that see all tokens. Published files have two global settings, and transformers
    writes the settings of each such layer. Raises ValueError if these layers differ."""
    usual = {
        "head_dim": hf.get("global_head_dim") or 512,
        "num_key_value_heads": hf.get("num_global_key_value_heads") or hf["num_key_value_heads"],
    }
    each = {int(i): own for i, own in (hf.get("per_layer_config") or {}).items()}  # "05" in a file
    found = {
        (own["head_dim"], own["num_key_value_heads"])
        for i, layer in enumerate(layers)
        if layer.window is None
        for own in [{**usual, **each.get(i, {})}]
    }
    if len(found) != 1:
        raise ValueError(
            f"per_layer_config in config.json must give one size of heads to the layers without a window, got "
            f"{sorted(found)}; other layers are not supported for this family"
        )
    size, groups = found.pop()
    return WideHeads(groups, size)


def experts(hf: Hf) -> Experts:
    """Returns the experts of each layer. The MLP next to them is the shared expert of the record."""
    need(hf, "top_k_experts", "moe_intermediate_size", "intermediate_size")
    count, width = expert_count(hf), hf["moe_intermediate_size"]
    return Experts(count, hf["top_k_experts"], width, shared=hf["intermediate_size"], parallel=True)


def read(hf: Hf) -> Decoder:
    """Returns the decoder. Raises ValueError for the parts of the small models (embeddings per layer, keys and values
    of earlier layers). For models without such embeddings, some files have null, which means 0."""
    need(hf, "head_dim", "attention_k_eq_v")
    if "hidden_size_per_layer_input" not in hf:
        need(hf, "hidden_size_per_layer_input")
    only(hf, hidden_activation="gelu_pytorch_tanh", attention_bias=False, attention_k_eq_v=True)
    only(hf, hidden_size_per_layer_input=0, num_kv_shared_layers=0, enable_moe_block=bool(expert_count(hf)))
    if hf.get("use_bidirectional_attention") == "all":
        only(hf, use_bidirectional_attention=None)
    decoder = read_decoder(
        {"tie_word_embeddings": True, **hf},
        post_norms=True,
        activation="geglu",
        windows=alternating_windows(hf, 6),
        qk_norm="head",
        rope=lambda hf, head_dim: ropes(hf, head_dim, head_dim)[1],
        experts=experts if expert_count(hf) else None,
    )
    wide = wide_heads(hf, decoder.layers)
    q, kv = decoder.heads * wide.head_dim, wide.groups * wide.head_dim
    attention = replace(
        Attention.grouped(decoder.hidden, q, kv), params=decoder.hidden * (2 * q + kv), kept=4 * q + 3 * kv
    )
    layers = tuple(
        replace(layer, kind="keys_as_values", attention=attention)
        if layer.window is None
        else replace(layer, kind="normed_values", rope=1)
        for layer in decoder.layers
    )
    return replace(
        decoder,
        layers=layers,
        ropes=ropes(hf, decoder.head_dim, wide.head_dim),
        wide=wide,
        layer_scale=True,
        embedding_scale=hf["hidden_size"] ** 0.5,
        attention_scale=1.0,
        logit_cap=hf.get("final_logit_softcapping"),
    )


def stored(tensors: Tensors, hf: Hf) -> Tensors:
    """Returns the tensors with every expert's tensors under its number."""
    plain = dequantized(tensors, hf)
    return ExpertTensors(plain, hf, may_turn=False) if expert_count(hf) else plain


def carried(hf: Hf) -> tuple[str, ...]:
    """Returns the prefixes of the towers and of their projections into the text model."""
    return tuple(f"model.{part}." for part in ("vision_tower", "embed_vision", "audio_tower", "embed_audio"))


_MG_MOE, _MG_EXPERT, _HF_EXPERT = MG + "mlp.", MG + "mlp.experts.local_experts.{e}.", HF + "experts.{e}."

ROWS = (
    *(*ENDS, *NORMS, *ATTENTION, *HEAD_NORMS, *MLP),
    Row(
        MG + "self_attention.linear_qk.weight",
        tuple(f"{HF}self_attn.{x}_proj.weight" for x in "qk"),
        GroupedQueryKey(),
    ),
    Row(MG + "layer_scalar", (HF + "layer_scalar",)),
    *mlp_rows(_MG_MOE + "shared_experts.", HF + "mlp."),
    *(
        Row(f"{_MG_MOE}{megatron}_layernorm.weight", (f"{HF}{name}.weight",))
        for megatron, name in (
            ("shared_pre", "pre_feedforward_layernorm"),
            ("shared_post", "post_feedforward_layernorm_1"),
            ("routed_pre", "pre_feedforward_layernorm_2"),
            ("routed_post", "post_feedforward_layernorm_2"),
        )
    ),
    Row(_MG_MOE + "router.weight", (HF + "router.proj.weight",)),
    Row(_MG_MOE + "router.norm.weight", (HF + "router.scale",)),
    Row(_MG_MOE + "router.expert_scale", (HF + "router.per_expert_scale",)),
    Row(_MG_EXPERT + "linear_fc1.weight", (_HF_EXPERT + "gate_up_proj",), GateUpTensor()),
    Row(_MG_EXPERT + "linear_fc2.weight", (_HF_EXPERT + "down_proj",), Direct(axis=1)),
)
"""Rows of both kinds of models: those of the MLP of a dense layer, and those of a layer with experts."""

GEMMA4_TEXT = Family(
    "gemma4_text",
    "Gemma 4, without towers",
    "26B-A4B, 31B",
    ROWS,
    read,
    ignored=IGNORED,
    stored=stored,
    written=partial(stacked, turned=False),
    flags=(
        ("rotary_base", lambda hf: ropes(hf, hf["head_dim"], hf["head_dim"])[1].theta),
        ("rotary_percent", lambda hf: 1.0),
    ),
)

TEXT = "model.language_model."

GEMMA4 = replace(
    GEMMA4_TEXT,
    model_type="gemma4",
    title="Gemma 4, text model",
    models="26B-A4B, 31B",
    rows=under(TEXT, ROWS),
    predicted=carried,
    ignored=tuple(name.replace("model.", TEXT, 1) for name in IGNORED),
    module_prefix=(TEXT, TEXT),
)
