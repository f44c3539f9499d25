"""Counts the parameters of a quantised checkpoint that its scheme quantises, so that an estimate has the bytes of an
engine's weights and of the files. Imports neither torch nor Megatron."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from slime.models import Family, family_for, read_decoder
from slime.models.latent import Latent
from slime.models.lora import get_module, linear_rows
from slime.models.quantized.quantization import QuantizationScheme, check_groups
from slime.plan.model_shape import Shape

_ATTENTION, _SHARED, _DENSE, _EXPERTS = "attention", "shared expert", "MLP", "experts"


@dataclass(frozen=True)
class QuantizedParams:
    """The number of parameters that a scheme quantises in all layers, and the bytes of a parameter with its share of
    the scale."""

    others: int
    """Without the routed experts."""
    experts: int
    bytes: float


def count_quantized(shape: Shape) -> QuantizedParams | None:
    """Returns the parameters that the checkpoint's scheme quantises. Returns None for plain weights."""
    family = family_for(shape.hf)
    scheme = family.scheme(shape.hf)
    if scheme is None:
        return None
    others = experts = 0
    for number, kind in enumerate(shape.kinds):
        parts = _converted(scheme, family, number)
        if _ATTENTION in parts:
            others += kind.attention.params + kind.attention.whole
        one = (shape.first + 1) * shape.hidden
        if not kind.sparse:
            others += one * shape.ffn if kind.mlp and _DENSE in parts else 0
            continue
        others += one * shape.shared_ffn if _SHARED in parts else 0
        experts += shape.layer(kind).experts if _EXPERTS in parts else 0
    return QuantizedParams(others, experts, scheme.bytes_per_weight)


def check_widths(shape: Shape) -> None:
    """Raises ValueError for the first matrix that the scheme cannot quantise, such as rows that are no whole groups of
    int4. The check covers MLPs, experts, and the output projection of the attention. It needs only config.json."""
    scheme = family_for(shape.hf).scheme(shape.hf)
    for matrix in quantized_matrices(shape):
        assert scheme is not None
        check_groups((matrix.rows, matrix.columns), scheme, f"{matrix.module}.weight")


@dataclass(frozen=True)
class QuantizedMatrix:
    """A matrix that a scheme quantises."""

    module: str
    rows: int
    columns: int
    splits_columns: bool
    """Tensor-parallel ranks of the trainer split its columns, not its rows."""
    is_expert: bool


def quantized_matrices(shape: Shape) -> Iterator[QuantizedMatrix]:
    """Yields the quantised matrices of MLPs, experts and output projections, in the first layer that has them."""
    family = family_for(shape.hf)
    scheme = family.scheme(shape.hf)
    if scheme is None:
        return
    widths = {_DENSE: shape.ffn, _SHARED: shape.shared_ffn, _EXPERTS: shape.expert_ffn}
    first = {kind.sparse: number for number, kind in reversed([*enumerate(shape.kinds)]) if kind.mlp}
    for row in linear_rows(family):
        part = _part(row.megatron)
        if row.megatron.endswith("linear_proj.weight"):
            softmax = (n for n, kind in enumerate(shape.kinds) if kind.softmax)
            layer, columns = next(softmax, None), attention_outputs(shape)
        else:
            layer, columns = first.get(part != _DENSE), widths.get(part, 0)
        second = row.megatron.endswith(("linear_fc2.weight", "linear_proj.weight"))
        for name in row.hf if layer is not None and columns else ():
            module = get_module(name).replace("{i}", str(layer)).replace("{e}", "0")
            if scheme.converts(module):
                rows, inputs = (shape.hidden, columns) if second else (columns, shape.hidden)
                yield QuantizedMatrix(module, rows, inputs, second, row.is_expert)


def attention_outputs(shape: Shape) -> int:
    """Returns the columns of the output projection of softmax attention."""
    decoder = read_decoder(shape.hf)
    latent = next((kind.attention for kind in shape.kinds if isinstance(kind.attention, Latent)), None)
    return decoder.heads * (latent.value if latent else decoder.head_dim)


def _converted(scheme: QuantizationScheme, family: Family, layer: int) -> set[str]:
    """Returns the parts of a layer whose matrices are all quantised. A part with plain matrices counts as plain, so an
    estimate is never too small."""
    found: dict[str, bool] = {}
    for row in linear_rows(family):
        for name in row.hf:
            module = get_module(name).replace("{i}", str(layer)).replace("{e}", "0")
            part = _part(row.megatron)
            found[part] = found.get(part, True) and scheme.converts(module)
    return {part for part, whole in found.items() if whole}


def _part(megatron: str) -> str:
    if "{e}" in megatron:
        return _EXPERTS
    if "shared_experts" in megatron:
        return _SHARED
    return _DENSE if ".mlp." in megatron else _ATTENTION
