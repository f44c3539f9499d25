"""Counts the parameters that a run trains, if some are frozen by name. Imports neither torch nor Megatron.

The count uses the same parts of a layer as `model_shape`. A part with some frozen matrices counts in proportion if the
sizes of its matrices are known (MLP, experts, grouped attention). Otherwise it counts as a whole.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Sequence

from slime.config import Config
from slime.models import Layer, family_for, read_decoder
from slime.models.decoder import Hf
from slime.models.selection import Selection
from slime.plan.model_shape import Params, Shape

_EMBEDDING, _HEAD = "embedding.word_embeddings.weight", "output_layer.weight"


def parameter_names(hf: Hf) -> list[str]:
    """Returns the names that a model's parameters may have. Some names occur only in other models of the family."""
    family, shape = family_for(hf), Shape.of(hf)
    rows = [row.megatron for row in family.rows]
    rows += [row.megatron for row in family.prediction.rows] if family.prediction else []
    layers = [row.replace("{i}", str(i)) for row in rows for i in range(shape.layers) if "{i}" in row]
    if (vision := read_decoder(hf).vision) is not None:
        for row in family.tower:
            numbers = range(vision.depth) if "{b}" in row.megatron else (0,)
            layers += [row.megatron.replace("{b}", str(number)) for number in numbers]
    names = [row for row in rows if "{i}" not in row] + layers
    return [
        name.replace("{e}", str(e))
        for name in names
        for e in (range(shape.experts) if "{e}" in name else (0,))
    ]


def check_parameter_names(c: Config, hf: Hf) -> None:
    """Raises ValueError for lists that match none or all of the parameters that the model may have."""
    if (selection := Selection.of(c)) and not c.lora.lora_rank:
        with contextlib.suppress(re.error):  # `check_selection` reports this error
            selection.check(parameter_names(hf))


def trained_params(selection: Selection, shape: Shape, layers: Iterable[int], ends: Sequence[str]) -> Params:
    """Returns the trained parameters of decoder layers, given by their numbers in the model, and of `ends`: embedding
    and head."""
    total = Params(split=shape.vocab * shape.hidden * sum(map(selection.trains, ends)))
    return sum((_count_layer(selection, shape, i) for i in layers), total)


def list_end_matrices(shape: Shape, *, first: bool, last: bool, head: bool = True) -> list[str]:
    """Returns the names of the matrices [vocab, hidden] of a pipeline stage. A tied head is a copy if the embedding is
    on another stage. Without `head`, no stage has a head."""
    own = head and last and not (first and shape.tied)
    return [_EMBEDDING] * first + [_EMBEDDING if shape.tied else _HEAD] * own


def _count_layer(selection: Selection, shape: Shape, number: int) -> Params:
    kind, prefix = shape.kinds[number], f"decoder.layers.{number}."
    frozen = kind.attention.frozen
    if not selection:
        return shape.layer(kind) + Params(whole=-frozen if not selection.indexer else 0)
    count = Params(whole=kind.attention.whole * _any(selection, shape, prefix + "self_attention."))
    count += Params(whole=frozen * selection.indexer)
    count += Params(split=round(kind.attention.params * _count_attention(selection, shape, kind, prefix)))
    if not kind.mlp:
        return count

    def count_mlp(part_name: str, width: int) -> int:
        shares = [selection.trains(f"{prefix}mlp.{part_name}linear_fc{i}.weight") for i in (1, 2)]
        return shape.hidden * width * (shape.first * shares[0] + shares[1])

    if not kind.sparse:
        return count + Params(split=count_mlp("", shape.ffn))
    router = shape.hidden * shape.experts * selection.trains(f"{prefix}mlp.router.weight")
    experts = sum(count_mlp(f"experts.local_experts.{e}.", shape.expert_ffn) for e in range(shape.experts))
    return count + Params(split=count_mlp("shared_experts.", shape.shared_ffn), whole=router, experts=experts)


def _count_attention(selection: Selection, shape: Shape, kind: Layer, prefix: str) -> float:
    """Returns the trained part of the split matrices of a layer's attention."""
    attention, q = kind.attention, kind.attention.pair_flops // 4
    if kind.kind != "full" or attention.params != shape.hidden * (2 * q + attention.cache):
        return float(_any(selection, shape, prefix + "self_attention."))
    inner = selection.trains(prefix + "self_attention.linear_qkv.weight")
    outer = selection.trains(prefix + "self_attention.linear_proj.weight")
    return (inner * (q + attention.cache) + outer * q) / (2 * q + attention.cache)


def _any(selection: Selection, shape: Shape, prefix: str) -> bool:
    """Returns whether a matrix whose name begins with `prefix` is trained."""
    number = prefix.split(".")[2]
    names = (row.replace("{i}", number) for row in shape.rows)
    return any(
        selection.trains(name) for name in names if name.startswith(prefix) and name.endswith(".weight")
    )
