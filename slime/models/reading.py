"""Readers of config.json that families share. Each reader raises ValueError for a missing key or an unsupported
value."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from slime.models.decoder import Attention, Decoder, Experts, Hf, Layer
from slime.models.rope import Rope, read_rope

SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "vocab_size",
    "rms_norm_eps",
)


def need(hf: Hf, *keys: str) -> None:
    """Raises ValueError for the first key in `keys` that is missing in config.json."""
    for key in keys:
        if hf.get(key) is None:
            raise ValueError(f"config.json must give {key}, got none; the checkpoint is incomplete")


def only(hf: Hf, **wanted: object) -> None:
    """Raises ValueError for a key of config.json with another value. A key that is missing or null is accepted."""
    for key, value in wanted.items():
        got = hf.get(key)
        if got is not None and got != value:
            raise ValueError(f"{key} in config.json must be {value}, got {got}; it is not supported")


def head_dim(hf: Hf) -> int:
    """Returns the size of an attention head: `head_dim`, or otherwise the hidden size divided by the number of heads.
    Raises ValueError if the heads do not divide the hidden size."""
    size, heads = hf.get("head_dim"), hf["num_attention_heads"]
    if size is None and hf["hidden_size"] % heads:
        raise ValueError(
            f"num_attention_heads in config.json must divide hidden_size without head_dim, got {hf['hidden_size']} / "
            f"{heads} = {hf['hidden_size'] / heads:.3f}; the checkpoint is incomplete"
        )
    return int(size or hf["hidden_size"] // heads)


def expert_count(hf: Hf) -> int:
    """Returns the number of routed experts per layer, 0 for a dense model. Qwen's files have num_experts, transformers
    5 writes num_local_experts instead, and GLM's files have n_routed_experts."""
    keys = ("num_experts", "num_local_experts", "n_routed_experts")
    return next((hf[key] for key in keys if hf.get(key)), 0)


def sparse_layers(hf: Hf) -> tuple[bool, ...]:
    """Returns, per layer, whether it has experts instead of an MLP: every `decoder_sparse_step`-th layer, except
    `mlp_only_layers` and the first `first_k_dense_replace` layers."""
    step, dense = hf.get("decoder_sparse_step", 1), hf.get("mlp_only_layers") or ()
    first = hf.get("first_k_dense_replace", 0)
    return tuple(
        i >= first and i not in dense and (i + 1) % step == 0 for i in range(hf["num_hidden_layers"])
    )


def softmax_experts(hf: Hf) -> Experts:
    """Returns experts with softmax scores: no bias, no groups, no shared expert."""
    need(hf, "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob")
    return Experts(
        count=expert_count(hf),
        topk=hf["num_experts_per_tok"],
        width=hf["moe_intermediate_size"],
        normalised=hf["norm_topk_prob"],
    )


def sigmoid_experts(hf: Hf) -> Experts:
    """Returns experts with sigmoid scores and a correction bias, in groups, with shared experts. The `n_shared_experts`
    of a layer are one MLP with the sum of their widths."""
    plain = softmax_experts(hf)
    need(hf, "n_shared_experts", "n_group", "topk_group", "routed_scaling_factor")
    if hf["routed_scaling_factor"] <= 0:
        raise ValueError(
            f"routed_scaling_factor in config.json must be above 0, got {hf['routed_scaling_factor']}; "
            "the checkpoint is incomplete"
        )
    return replace(
        plain,
        shared=hf["n_shared_experts"] * plain.width,
        score="sigmoid",
        bias=True,
        groups=(hf["n_group"], hf["topk_group"]) if hf["n_group"] > 1 else None,
        scale=float(hf["routed_scaling_factor"]),
    )


def sizes(hf: Hf) -> dict[str, Any]:
    """Returns the fields of `Decoder` that every family's config.json has under the same keys."""
    need(hf, *SIZES)
    return {
        "hidden": hf["hidden_size"],
        "ffn": hf["intermediate_size"],
        "heads": hf["num_attention_heads"],
        "vocab": hf["vocab_size"],
        "context": hf.get("max_position_embeddings") or 0,
        "norm_eps": hf["rms_norm_eps"],
        "tied": bool(hf.get("tie_word_embeddings", False)),
    }


def read_decoder(
    hf: Hf,
    *,
    qkv_bias: bool = False,
    output_bias: bool = False,
    qk_norm: str = "",
    post_norms: bool = False,
    activation: str = "swiglu",
    rope: Callable[[Hf, int], Rope] | None = None,
    rotates: bool = True,
    windows: Sequence[int | None] | None = None,
    experts: Callable[[Hf], Experts] | None = None,
) -> Decoder:
    """Returns the decoder of a family with grouped softmax attention and gated MLPs.

    `rope` reads the rotary embedding from config.json and the head size (None: whole heads). Without
    `rotates`, the model has no rotary embedding. `windows` has the sliding
    window per layer (None: no layer has a window). `experts` reads the experts of the sparse layers; a family without
    it is dense.
    """
    parsed = sizes(hf)
    only(hf, mlp_bias=False, **({"hidden_act": "silu"} if activation == "swiglu" else {}))
    layers, heads = hf["num_hidden_layers"], hf["num_attention_heads"]
    groups, size = hf.get("num_key_value_heads") or heads, head_dim(hf)
    if heads % groups:
        raise ValueError(
            f"num_key_value_heads in config.json must divide the {heads} num_attention_heads, got {groups}: "
            f"{heads} / {groups} = {heads / groups:.3f}; the checkpoint is incomplete"
        )
    found = check_experts(hf, experts)
    sparse = sparse_layers(hf) if found else (False,) * layers
    attention = Attention.grouped(hf["hidden_size"], heads * size, groups * size)
    of_layers = [
        Layer(attention, window=window, sparse=has)
        for window, has in zip(windows or [None] * layers, sparse, strict=True)
    ]
    return Decoder(
        **parsed,
        groups=groups,
        head_dim=size,
        layers=tuple(of_layers),
        ropes=(rope(hf, size) if rope else read_rope(hf, size, whole=True),) if rotates else (),
        experts=found,
        qkv_bias=qkv_bias,
        output_bias=output_bias,
        qk_norm=qk_norm,
        post_norms=post_norms,
        activation=activation,
    )


def check_experts(hf: Hf, experts: Callable[[Hf], Experts] | None) -> Experts | None:
    """Returns the experts in config.json. Raises ValueError if a dense family's file has experts, or the file of a
    family with experts has no experts."""
    count = expert_count(hf)
    if experts is None:
        if count:
            raise ValueError(
                f"model_type in config.json must be that of a family with experts, got {hf.get('model_type')} with "
                f"{count} experts; `vime models` lists the families"
            )
        return None
    if not count:
        raise ValueError(
            f"config.json must give num_experts for model_type {hf.get('model_type')}, got none; the checkpoint is "
            "incomplete"
        )
    found = experts(hf)
    if not 1 <= found.topk <= count:
        raise ValueError(
            f"num_experts_per_tok in config.json must lie in [1, {count}], the experts, got {found.topk}; the "
            "checkpoint is incomplete"
        )
    if found.groups:
        _check_groups(count, found.topk, *found.groups)
    return found


def _check_groups(count: int, topk: int, groups: int, chosen: int) -> None:
    """Raises ValueError if `count` experts do not form `groups` equal groups, or if `chosen` groups have fewer than
    `topk` experts."""
    if count % groups:
        raise ValueError(
            f"n_group in config.json must divide the {count} experts, got {groups}: {count} / {groups} = "
            f"{count / groups:.3f}; the checkpoint is incomplete"
        )
    if not 1 <= chosen <= groups or chosen * (count // groups) < topk:
        raise ValueError(
            f"topk_group in config.json must lie in [1, {groups}] and leave {topk} experts to choose, got {chosen}: "
            f"{chosen} x {count // groups} = {chosen * (count // groups)}; the checkpoint is incomplete"
        )


def sliding_windows(hf: Hf) -> list[int | None]:
    """Returns the window of every layer, for a family where `sliding_window` applies to all layers. Raises ValueError
    for a window below 1."""
    window = hf.get("sliding_window")
    if window is not None and window < 1:
        raise ValueError(
            f"sliding_window in config.json must be at least 1 or null, got {window}; the checkpoint is incomplete"
        )
    return [window] * hf["num_hidden_layers"]


def alternating_windows(hf: Hf, pattern: int) -> list[int | None]:
    """Returns the window of every layer, for a family where `layer_types` lists the sliding layers. Without
    `layer_types`, as in older files, every `pattern`-th layer sees all tokens. Raises ValueError for another kind of
    layer, or a window below 1."""
    need(hf, "sliding_window")
    depth = hf["num_hidden_layers"]
    usual = ["full_attention" if (i + 1) % pattern == 0 else "sliding_attention" for i in range(depth)]
    kinds = hf.get("layer_types") or usual
    known = {"sliding_attention", "full_attention"}
    if len(kinds) != depth or not known.issuperset(kinds):
        raise ValueError(
            f"layer_types in config.json must name {' or '.join(sorted(known))} for each of the {depth} layers, got "
            f"{kinds}; other layers are not supported for this family"
        )
    windows = sliding_windows(hf)
    return [w if kind == "sliding_attention" else None for w, kind in zip(windows, kinds, strict=True)]


def with_predictions(hf: Hf, decoder: Decoder) -> Decoder:
    """Returns `decoder` with its layers of multi-token prediction: `num_nextn_predict_layers` copies of its last
    layer."""
    return replace(decoder, predictions=decoder.layers[-1:] * (hf.get("num_nextn_predict_layers") or 0))
