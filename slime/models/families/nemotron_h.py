"""Nemotron-H and Nemotron 3: layers with one part each, Mamba-2, attention without positions, an MLP, or experts. MLPs
and experts have no gate and square their ReLU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from slime.models.decoder import NO_ATTENTION, Decoder, Experts, Hf, Layer, Mamba
from slime.models.family import Family
from slime.models.hybrid import ByKeyHead
from slime.models.layouts import Direct, GroupedQkv, Row, Vocab
from slime.models.reading import check_experts, need, only, read_decoder, sigmoid_experts
from slime.models.rows import MG

_LETTERS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
_OLD = {"mamba": "linear_attention", "attention": "full_attention"}
"""Names of `layers_block_type` that earlier versions of transformers wrote."""
_MAMBA = ("mamba_num_heads", "mamba_head_dim", "ssm_state_size", "n_groups", "conv_kernel")


_DEFAULTS = {
    **{"n_shared_experts": 1, "n_group": 1, "topk_group": 1, "norm_topk_prob": True},
    **{"routed_scaling_factor": 1.0, "layer_norm_epsilon": 1e-5, "conv_kernel": 4},
}


def layer_parts(hf: Hf) -> list[str]:
    """Returns one part per layer, from `layers_block_type` or the letters of `hybrid_override_pattern`. Raises
    ValueError for another part or none."""
    pattern, listed = hf.get("hybrid_override_pattern"), hf.get("layers_block_type")
    if listed is None and pattern is not None:
        listed = [_LETTERS.get(letter, letter) for letter in pattern]
    parts = [_OLD.get(part, part) for part in listed or ()]
    if not parts or set(parts) - set(_LETTERS.values()):
        raise ValueError(
            f"layers_block_type in config.json must give {', '.join(_LETTERS.values())} per layer, or "
            f"hybrid_override_pattern their letters {''.join(_LETTERS)}, got {listed}; the checkpoint is incomplete"
        )
    return parts


def derived(hf: Hf) -> Mapping[str, object]:
    """Returns the fields that transformers leaves out: the number of layers, and the norms' epsilon."""
    return {"num_hidden_layers": len(layer_parts(hf)), "rms_norm_eps": hf.get("layer_norm_epsilon")}


def read_mamba(hf: Hf) -> Mamba:
    """Returns the sizes of the Mamba-2 layers. Raises ValueError for sizes below 1 and for groups that do not divide
    the heads."""
    for key in _MAMBA:
        if type(hf.get(key)) is not int or hf[key] < 1:
            raise ValueError(
                f"{key} in config.json must be at least 1, got {hf.get(key)}; the checkpoint is incomplete"
            )
    heads, size, state, groups, taps = (hf[key] for key in _MAMBA)
    if heads % groups:
        raise ValueError(
            f"n_groups in config.json must divide the {heads} mamba_num_heads, got {groups}: {heads} / {groups} = "
            f"{heads / groups:.3f}; the checkpoint is incomplete"
        )
    return Mamba(groups, heads, size, state, taps, conv_bias=hf.get("use_conv_bias", True))


def experts(hf: Hf) -> Experts:
    """Returns the experts. Raises ValueError for experts in a latent space, and for several shared experts."""
    only(hf, n_shared_experts=1, moe_latent_size=0)
    need(hf, "moe_shared_expert_intermediate_size")
    return replace(sigmoid_experts(hf), shared=hf["moe_shared_expert_intermediate_size"])


def read(hf: Hf) -> Decoder:
    """Returns the decoder. Raises ValueError for parts that the published models do not use."""
    only(hf, use_bias=False, mamba_proj_bias=False, attention_bias=False, residual_in_fp32=False)
    only(hf, mamba_hidden_act="silu", mlp_hidden_act="relu2", sliding_window=0)
    _check_step_limit(hf)
    parts = layer_parts(hf)
    has_experts = "moe" in parts
    hf = {**hf, **derived(hf)}
    if not has_experts:
        hf["n_routed_experts"] = 0
    found = check_experts(hf, experts if has_experts else None)
    decoder = read_decoder(
        {**hf, "n_routed_experts": 0, "num_hidden_layers": len(parts)}, activation="relu2", rotates=False
    )
    mamba = read_mamba(hf) if "linear_attention" in parts else None
    full = decoder.layers[0].attention

    def layer_for(part: str) -> Layer:
        if part == "full_attention":
            return Layer(full, rope=None, mlp=False)
        if part == "linear_attention":
            assert mamba is not None
            return Layer(mamba.attention(decoder.hidden), "mamba", rope=None, mlp=False)
        return Layer(NO_ATTENTION, "none", rope=None, sparse=part == "moe")

    return replace(
        decoder,
        layers=tuple(map(layer_for, parts)),
        experts=found,
        gated=False,
        mamba=mamba,
        state_dtype=hf.get("mamba_ssm_cache_dtype") or "",
    )


def _check_step_limit(hf: Hf) -> None:
    """Raises ValueError for limits of the time steps. transformers writes infinity as a record."""
    limit = hf.get("time_step_limit")
    if limit is None:
        return
    low, high = limit
    endless = high == {"__float__": "Infinity"} or high == float("inf")
    if low != 0 or not endless:
        raise ValueError(
            f"time_step_limit in config.json must be 0 to infinity, got {limit}; vLLM has no other limits"
        )


def predicted(hf: Hf) -> tuple[str, ...]:
    """Returns the prefix of the layers of multi-token prediction."""
    return ("mtp.",)


_HF = "backbone.layers.{i}."
_MIXER, _ATTENTION, _MLP = _HF + "mixer.", MG + "self_attention.", MG + "mlp."


def _mlp(megatron: str, hf: str) -> tuple[Row, ...]:
    return (
        Row(megatron + "linear_fc1.weight", (hf + "up_proj.weight",), Direct(axis=0)),
        Row(megatron + "linear_fc2.weight", (hf + "down_proj.weight",), Direct(axis=1)),
    )


ROWS = (
    Row("embedding.word_embeddings.weight", ("backbone.embeddings.weight",), Vocab()),
    Row("decoder.final_layernorm.weight", ("backbone.norm_f.weight",)),
    Row("output_layer.weight", ("lm_head.weight",), Vocab()),
    Row(MG + "input_layernorm.weight", (_HF + "norm.weight",)),
    Row(MG + "pre_mlp_layernorm.weight", (_HF + "norm.weight",)),
    Row(_ATTENTION + "linear_qkv.weight", tuple(f"{_MIXER}{x}_proj.weight" for x in "qkv"), GroupedQkv()),
    Row(_ATTENTION + "linear_proj.weight", (_MIXER + "o_proj.weight",), Direct(axis=1)),
    Row(
        _ATTENTION + "in_proj.weight",
        (_MIXER + "in_proj.weight",),
        ByKeyHead(parts=((0, 1, 2, 3, 4),)),
    ),
    Row(_ATTENTION + "conv_weight", (_MIXER + "conv1d.weight",), ByKeyHead(parts=((1, 2, 3),))),
    Row(_ATTENTION + "conv_bias", (_MIXER + "conv1d.bias",), ByKeyHead(parts=((1, 2, 3),))),
    *(
        Row(_ATTENTION + mine, (_MIXER + theirs,), Direct(axis=0))
        for mine, theirs in (
            ("A_log", "A_log"),
            ("D", "D"),
            ("dt_bias", "dt_bias"),
            ("norm_weight", "norm.weight"),
        )
    ),
    Row(_ATTENTION + "out_proj.weight", (_MIXER + "out_proj.weight",), Direct(axis=1)),
    *_mlp(_MLP, _MIXER),
    Row(_MLP + "router.weight", (_MIXER + "gate.weight",)),
    Row(_MLP + "router.expert_bias", (_MIXER + "gate.e_score_correction_bias",)),
    *_mlp(_MLP + "experts.local_experts.{e}.", _MIXER + "experts.{e}."),
    *_mlp(_MLP + "shared_experts.", _MIXER + "shared_experts."),
)

NEMOTRON_H = Family(
    "nemotron_h",
    "Nemotron-H and Nemotron 3 Nano",
    "8B, 47B, 56B, 3 Nano 30B-A3B",
    ROWS,
    read,
    defaults=_DEFAULTS,
    derived=derived,
    predicted=predicted,
    aliases=(("model.", "backbone."),),
    module_prefix=("backbone.", "model."),
)
"""A file's tensor `mixer.up_proj` of layer i is the MLP of a layer whose attention slot is empty."""
