"""Parts of the families with gated delta net layers (Qwen3-Next, Qwen3.5): readers of config.json and weight rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from slime.models.decoder import Decoder, DeltaNet, Experts, Hf, Layer
from slime.models.layouts import Direct, Row, cat
from slime.models.reading import only, read_decoder
from slime.models.rope import Rope, read_rope, rope_record
from slime.models.rows import ENDS, HEAD_NORMS, HF, MG, NORMS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from slime.models.layouts import Sizes

MG_DELTA, HF_DELTA = MG + "self_attention.", HF + "linear_attn."
FULL, LINEAR = "full_attention", "linear_attention"

_DEFAULTS = {
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}
SHARED_WIDTH = {"shared_expert_intermediate_size": 512}
"""Default that transformers and vLLM use for a key that is missing in config.json."""

FLAGS: tuple[tuple[str, Callable[[Hf], object]], ...] = (
    ("attention_output_gate", lambda hf: True),
    ("apply_layernorm_1p", lambda hf: True),
    ("rotary_percent", lambda hf: rope_record(hf).get("partial_rotary_factor", 0.25)),
)
"""MODEL_ARGS of slime's scripts for these models."""


def rope(hf: Hf, head_dim: int) -> Rope:
    """Returns the rotary embedding, which rotates a quarter of a head. The axes of image positions alternate."""
    only(rope_record(hf), mrope_interleaved=True)
    record = {key: value for key, value in rope_record(hf).items() if key != "mrope_interleaved"}
    return read_rope(hf, head_dim, fraction=0.25, record=record, alternating=(11, 11, 10))


def read_delta(hf: Hf) -> DeltaNet:
    """Returns the sizes of the gated delta net layers. Raises ValueError for heads that do not divide, or sizes below
    1."""
    sizes = {key: hf.get(key, default) for key, default in _DEFAULTS.items()}
    for key, value in sizes.items():
        if not isinstance(value, int) or value < 1:
            raise ValueError(
                f"{key} in config.json must be at least 1, got {value}; the checkpoint is incomplete"
            )
    keys, values = sizes["linear_num_key_heads"], sizes["linear_num_value_heads"]
    if values % keys:
        raise ValueError(
            f"linear_num_key_heads in config.json must divide the {values} linear_num_value_heads, got {keys}: "
            f"{values} / {keys} = {values / keys:.3f}; the checkpoint is incomplete"
        )
    return DeltaNet(
        keys,
        values,
        sizes["linear_key_head_dim"],
        sizes["linear_value_head_dim"],
        sizes["linear_conv_kernel_dim"],
    )


def layer_types(hf: Hf) -> list[str]:
    """Returns the kind of every layer: `layer_types`, or otherwise softmax attention in every
    `full_attention_interval`-th layer. Raises ValueError for another length or another kind."""
    depth, interval = hf["num_hidden_layers"], hf.get("full_attention_interval") or 4
    found = hf.get("layer_types") or [LINEAR if (i + 1) % interval else FULL for i in range(depth)]
    if len(found) != depth or set(found) - {FULL, LINEAR}:
        raise ValueError(
            f"layer_types in config.json must give {FULL} or {LINEAR} for each of the {depth} layers, got {found}; the "
            "checkpoint is incomplete"
        )
    return list(found)


def read_hybrid(hf: Hf, *, experts: Callable[[Hf], Experts] | None = None) -> Decoder:
    """Returns a decoder with gated delta net layers, as config.json lists them, and gated attention in the other
    layers. Its norms multiply by 1 + weight."""
    only(hf, attention_bias=False)
    decoder = read_decoder(hf, qk_norm="head", rope=rope, experts=experts)
    delta, hidden = read_delta(hf), decoder.hidden
    gate = decoder.heads * decoder.head_dim

    def of(layer: Layer, kind: str) -> Layer:
        if kind == LINEAR:
            return replace(layer, attention=delta.attention(hidden), kind="gated_delta_net", rope=None)
        attention = layer.attention
        wide = replace(attention, params=attention.params + hidden * gate, kept=attention.kept + 2 * gate)
        return replace(layer, attention=wide)

    layers = tuple(of(layer, kind) for layer, kind in zip(decoder.layers, layer_types(hf), strict=True))
    return replace(decoder, layers=layers, output_gate=True, zero_centred=True, delta=delta)


@dataclass(frozen=True)
class GatedQkv(Direct):
    """Layout of q [A, 2, D, H] with a gate after every head, and k and v [G*D, H]. Megatron orders the rows by group:
    (q heads, their gates, k, v of group 0, ..)."""

    axis: int | None = 0

    def join(self, parts: Sequence[Tensor], sizes: Sizes) -> Tensor:
        q, *kv = (part.reshape(sizes.groups, -1, part.shape[-1]) for part in parts)
        q = q.unflatten(1, (-1, 2, sizes.head_dim)).transpose(1, 2).flatten(1, 3)
        return cat([q, *kv], 1).flatten(0, 1)

    def split(self, full: Tensor, sizes: Sizes) -> list[Tensor]:
        by_group = full.reshape(sizes.groups, -1, full.shape[-1])
        rows = by_group.shape[1] - 2 * sizes.head_dim
        q, k, v = by_group.split([rows, sizes.head_dim, sizes.head_dim], dim=1)
        q = q.unflatten(1, (2, -1, sizes.head_dim)).transpose(1, 2).flatten(1, 3)
        return [x.flatten(0, 1) for x in (q, k, v)]


@dataclass(frozen=True)
class ByKeyHead(Direct):
    """Layout of the rows of a gated delta net or a Mamba-2 layer. Megatron orders them by key head or group, in the
    order of `DeltaNet.widths` or `Mamba.widths`."""

    parts: tuple[tuple[int, ...], ...] = ()
    """For each HF tensor, the indices of `widths` that it holds."""
    by_head: bool = False
    """HF orders a tensor's parts by head. Otherwise each part is stored for all heads before the next part."""
    axis: int | None = 0

    def join(self, parts: Sequence[Tensor], sizes: Sizes) -> Tensor:
        delta = sizes.delta
        assert delta is not None
        found: list[Tensor] = []
        for tensor, numbers in zip(parts, self.parts, strict=True):
            rows = [delta.keys * delta.widths[n] for n in numbers]
            pieces = [tensor] if self.by_head else tensor.split(rows)
            found += [piece.reshape(delta.keys, -1, *piece.shape[1:]) for piece in pieces]
        return cat(found, 1).flatten(0, 1)

    def split(self, full: Tensor, sizes: Sizes) -> list[Tensor]:
        delta = sizes.delta
        assert delta is not None
        by_head = full.reshape(delta.keys, -1, *full.shape[1:])
        pieces = iter(by_head.split([delta.widths[n] for numbers in self.parts for n in numbers], dim=1))
        tensors = []
        for numbers in self.parts:
            mine = [next(pieces) for _ in numbers]
            tensors.append(
                cat(mine, 1).flatten(0, 1) if self.by_head else cat([piece.flatten(0, 1) for piece in mine])
            )
        return tensors


GATED_ATTENTION = (
    Row(
        MG + "self_attention.linear_qkv.weight",
        tuple(f"{HF}self_attn.{x}_proj.weight" for x in "qkv"),
        GatedQkv(),
    ),
    Row(MG + "self_attention.linear_proj.weight", (HF + "self_attn.o_proj.weight",), Direct(axis=1)),
)
DELTA_NET = (
    Row(MG_DELTA + "conv_weight", (HF_DELTA + "conv1d.weight",), ByKeyHead(parts=((0, 1, 2),))),
    Row(MG_DELTA + "A_log", (HF_DELTA + "A_log",), Direct(axis=0)),
    Row(MG_DELTA + "dt_bias", (HF_DELTA + "dt_bias",), Direct(axis=0)),
    Row(MG_DELTA + "norm_weight", (HF_DELTA + "norm.weight",)),
    Row(MG_DELTA + "out_proj.weight", (HF_DELTA + "out_proj.weight",), Direct(axis=1)),
)
"""Rows of a gated delta net without its input projection, which every family's files hold in another form."""


def hybrid_rows(
    names: Sequence[str], parts: tuple[tuple[int, ...], ...], *, by_head: bool = False
) -> tuple[Row, ...]:
    """Returns the rows of such a decoder without MLPs and experts. `names` are the names of the input projection's
    tensors in files, after "in_proj_". `parts` and `by_head` describe their content (`ByKeyHead`)."""
    projection = Row(
        MG_DELTA + "in_proj.weight",
        tuple(f"{HF_DELTA}in_proj_{name}.weight" for name in names),
        ByKeyHead(parts=parts, by_head=by_head),
    )
    return (*(ENDS + NORMS + GATED_ATTENTION + HEAD_NORMS + DELTA_NET), projection)
