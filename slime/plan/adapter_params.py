"""Counts the parameters of a run's adapters. Imports neither torch nor Megatron.

The count follows slime.megatron_backend.lora: an A and a B for each module of a product, by the family's rows.
"""

from __future__ import annotations

from collections.abc import Iterable

from slime.models import Decoder, Layer, family_for, read_decoder
from slime.models.decoder import Hf
from slime.models.family import Family
from slime.models.hybrid import ByKeyHead
from slime.models.latent import Latent
from slime.models.layouts import Row
from slime.models.lora import Lora, get_adapted_module, linear_rows
from slime.plan.model_shape import Params


def adapter_params(lora: Lora, hf: Hf, layers: Iterable[int]) -> Params:
    """Returns the adapter parameters of decoder layers, given by their numbers in the model."""
    family, decoder = family_for(hf), read_decoder(hf)
    rows = list(linear_rows(family))
    return sum((_count_row(lora, family, decoder, row, i) for i in layers for row in rows), Params())


def _count_row(lora: Lora, family: Family, decoder: Decoder, row: Row, number: int) -> Params:
    layer = decoder.layers[number]
    sizes = product_sizes(decoder, layer, row)
    if sizes is None:
        return Params()
    inputs, outputs = sizes
    modules = [
        get_adapted_module(name, family).replace("{i}", str(number)).replace("{e}", "0") for name in row.hf
    ]
    count = Params()
    for module, wide in zip(modules, outputs, strict=True):
        if not lora.adapts(module):
            continue
        a, b = lora.rank * inputs, lora.rank * wide
        if row.is_expert:
            assert decoder.experts is not None
            count += Params(experts=decoder.experts.count * (a + b))
        elif row.layout.axis == 0:
            count += Params(whole=a, split=b)
        elif row.layout.axis == 1:
            count += Params(split=a, whole=b)
        else:
            count += Params(whole=a + b)
    return count


def product_sizes(decoder: Decoder, layer: Layer, row: Row) -> tuple[int, list[int]] | None:
    """Returns (inputs of a product, outputs per module), or None for a product that the layer does not have."""
    path, hidden = row.megatron.split("decoder.layers.{i}.")[1].removesuffix(".weight"), decoder.hidden
    if path.startswith("self_attention."):
        return _list_attention_products(decoder, layer, row).get(path.removeprefix("self_attention."))
    routed, shared = "experts.local_experts." in path, "shared_experts." in path
    experts = decoder.experts
    if not layer.mlp or layer.sparse != (routed or shared):
        return None
    width = decoder.ffn
    if layer.sparse:
        assert experts is not None
        width = experts.width if routed else experts.shared
    if not width:
        return None
    if path.endswith("linear_fc2"):
        return width, [hidden]
    return hidden, [(2 if decoder.gated else 1) * width // len(row.hf)] * len(row.hf)


def _list_attention_products(decoder: Decoder, layer: Layer, row: Row) -> dict[str, tuple[int, list[int]]]:
    """Returns Megatron's name of a product in the layer's attention -> its sizes."""
    attention, hidden = layer.attention, decoder.hidden
    if isinstance(attention, Latent):
        heads, queries = decoder.heads, attention.q_rank
        found = {
            "linear_kv_down_proj": (hidden, [attention.kv_rank + attention.turned]),
            "linear_kv_up_proj": (attention.kv_rank, [heads * (attention.plain + attention.value)]),
            "linear_proj": (heads * attention.value, [hidden]),
        }
        if queries is None:
            return found | {"linear_q_proj": (hidden, [heads * attention.key])}
        down, up = (hidden, [queries]), (queries, [heads * attention.key])
        return found | {"linear_q_down_proj": down, "linear_q_up_proj": up}
    if layer.kind == "gated_delta_net":
        delta = decoder.delta
        assert delta is not None
        numbers = row.layout.parts if isinstance(row.layout, ByKeyHead) else ()
        mixed = [delta.keys * sum(delta.widths[n] for n in of_module) for of_module in numbers]
        return {"out_proj": (delta.values * delta.value_dim, [hidden]), "in_proj": (hidden, mixed)}
    if layer.kind == "mamba":
        assert decoder.mamba is not None
        wide = decoder.mamba.heads * decoder.mamba.head_dim
        return {
            "out_proj": (wide, [hidden]),
            "in_proj": (hidden, [decoder.mamba.keys * sum(decoder.mamba.widths)]),
        }
    if layer.kind == "none":
        return {}
    q, kv = attention.pair_flops // 4, attention.cache // 2
    wide = 2 * q if decoder.output_gate else q
    return {"linear_qkv": (hidden, [wide, kv, kv]), "linear_proj": (q, [hidden])}
