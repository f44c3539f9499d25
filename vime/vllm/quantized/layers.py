"""Describes the layers in which vLLM computes the quantised matrices of a checkpoint, as far as they decide whether an
engine can load it.

vLLM fuses matrices of a checkpoint into one layer, such as queries, keys and values. The ranks of tensor parallelism
split the rows or the columns of a layer. config.json alone decides which layers are quantised. tests/vime/vllm compares
this file with layers of the installed vLLM.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from slime.models import Decoder, Layer, family_for, read_decoder
from slime.models.decoder import Hf
from slime.models.latent import Latent
from slime.models.layouts import Row
from slime.models.lora import get_module, linear_rows
from slime.models.quantized.quantization import QuantizationScheme, fused_name
from vime.vllm import versions


@dataclass(frozen=True)
class EngineLayer:
    """A layer of vLLM that multiplies by one or several matrices."""

    modules: tuple[str, ...]
    """Names of its modules in the checkpoint."""
    rows: tuple[int, ...]
    """Rows of its parts, over all ranks. vLLM may have other parts than the checkpoint has modules."""
    columns: int
    split: Literal["rows", "columns", "nothing"]
    """The axis that tensor-parallel ranks split."""
    is_expert: bool = False

    @property
    def name(self) -> str:
        """Returns the name of vLLM's layer, in the checkpoint's spelling."""
        return fused_name(self.modules[0]) if len(self.modules) > 1 else self.modules[0]


def engine_layers(hf: Hf, ranks: int) -> Iterator[EngineLayer]:
    """Yields the layers of vLLM with `ranks` tensor-parallel ranks: those of the decoder without its routers. The
    first expert represents all experts of a layer."""
    family, decoder = family_for(hf), read_decoder(hf)
    rows = list(linear_rows(family))
    for number, layer in enumerate(decoder.layers):
        found: dict[str, tuple[str, ...]] = {}
        for row in rows:
            if _has(layer, row):
                names = (get_module(name).replace("{e}", "0").replace("{i}", str(number)) for name in row.hf)
                found[_kind(row)] = tuple(names)
        yield from _layers(found, layer, decoder, ranks)


def _kind(row: Row) -> str:
    """Returns the last part of a row's name in Megatron, with the part that owns an MLP."""
    owner, last = row.megatron.removesuffix(".weight").split(".")[-2:]
    part = "experts" if row.is_expert else owner
    return f"{part}.{last}" if last in ("linear_fc1", "linear_fc2") else last


def _has(layer: Layer, row: Row) -> bool:
    kind = _kind(row)
    if kind.startswith("mlp."):
        return layer.dense
    if kind.startswith(("experts.", "shared_experts.")):
        return layer.sparse
    if kind in ("in_proj", "out_proj"):
        return layer.kind in ("gated_delta_net", "mamba")
    if kind.startswith(("linear_q_", "linear_kv_")):
        wide = isinstance(layer.attention, Latent) and layer.attention.q_rank is None
        return layer.kind == "latent" and (kind.startswith("linear_kv_") or wide is (kind == "linear_q_proj"))
    return layer.softmax


def _layers(
    modules: dict[str, tuple[str, ...]], layer: Layer, decoder: Decoder, ranks: int
) -> Iterator[EngineLayer]:
    """Yields the layers of vLLM for one decoder layer. `modules` maps the kind of a row to its modules."""
    hidden, experts = decoder.hidden, decoder.experts
    widths = {"mlp": decoder.ffn}
    if experts is not None:
        widths |= {"experts": experts.width, "shared_experts": experts.shared}
    for part, width in widths.items():
        if f"{part}.linear_fc1" in modules and width:
            both, down = modules[f"{part}.linear_fc1"], modules[f"{part}.linear_fc2"]
            yield EngineLayer(
                both, (width,) * (2 if decoder.gated else 1), hidden, "rows", is_expert=part == "experts"
            )
            yield EngineLayer(down, (hidden,), width, "columns", is_expert=part == "experts")
    if layer.kind == "latent":
        assert isinstance(layer.attention, Latent)
        yield from _latent_layers(modules, layer.attention, decoder)
    elif layer.kind == "mamba":
        assert decoder.mamba is not None
        gates, values, b, c, steps = (decoder.mamba.keys * width for width in decoder.mamba.widths)
        yield EngineLayer(modules["in_proj"], (gates, values, b, c, steps), hidden, "rows")
        yield EngineLayer(modules["out_proj"], (hidden,), values, "columns")
    elif layer.kind == "gated_delta_net":
        yield from _delta_layers(modules, decoder)
    elif "linear_qkv" in modules:
        size, heads = decoder.head_dim, decoder.heads
        queries = heads * size * (2 if decoder.output_gate else 1)
        keys = max(decoder.groups, ranks) * size  # several ranks hold the same head if there are more ranks
        yield EngineLayer(modules["linear_qkv"], (queries, keys, keys), hidden, "rows")
        yield EngineLayer(modules["linear_proj"], (hidden,), heads * size, "columns")


def _latent_layers(
    modules: dict[str, tuple[str, ...]], sizes: Latent, decoder: Decoder
) -> Iterator[EngineLayer]:
    heads, down = decoder.heads, modules["linear_kv_down_proj"]
    narrow = sizes.kv_rank + sizes.turned
    if sizes.q_rank is None:
        yield EngineLayer(modules["linear_q_proj"], (heads * sizes.key,), decoder.hidden, "rows")
        yield EngineLayer(down, (narrow,), decoder.hidden, "nothing")
    else:
        both = (*modules["linear_q_down_proj"], *down)
        yield EngineLayer(both, (sizes.q_rank, narrow), decoder.hidden, "nothing")
        yield EngineLayer(modules["linear_q_up_proj"], (heads * sizes.key,), sizes.q_rank, "rows")
    up = heads * (sizes.plain + sizes.value)
    yield EngineLayer(modules["linear_kv_up_proj"], (up,), sizes.kv_rank, "rows")
    yield EngineLayer(modules["linear_proj"], (decoder.hidden,), heads * sizes.value, "columns")


def _delta_layers(modules: dict[str, tuple[str, ...]], decoder: Decoder) -> Iterator[EngineLayer]:
    delta, names = decoder.delta, modules["in_proj"]
    assert delta is not None
    keys, values = delta.keys * delta.key_dim, delta.values * delta.value_dim
    wide: tuple[int, ...] = (keys, keys, values, values)
    narrow: tuple[int, ...] = (delta.values, delta.values)
    if len(names) == 2:  # each module has all its parts in one matrix, by key head
        wide, narrow = (sum(wide),), (sum(narrow),)
    half = len(names) // 2
    yield EngineLayer(names[:half], wide, decoder.hidden, "rows")
    yield EngineLayer(names[half:], narrow, decoder.hidden, "rows")
    yield EngineLayer(modules["out_proj"], (decoder.hidden,), values, "columns")


class EngineReading:
    """Reads the module lists in config.json as vLLM does: `modules_to_not_convert` of fp8, `ignore` and `targets` of
    compressed-tensors. vLLM compares each entry with whole names of modules or of vLLM layers. For compressed-tensors,
    an entry may also be a pattern that begins with "re:"."""

    def __init__(self, scheme: QuantizationScheme) -> None:
        self._scheme = scheme
        self._ignored, self._targets = (
            _ModuleList(names, scheme) for names in (scheme.ignored, scheme.targets)
        )

    def ignored(self, layer: EngineLayer) -> tuple[bool, ...]:
        """Returns, per module, whether config.json excludes the module from the scheme. vLLM needs equal values for all
        modules of a layer."""
        if layer.is_expert and self._scheme.method == "fp8":
            experts = layer.modules[0].rpartition(".0.")[0]
            return (any(experts in name for name in self._scheme.ignored),) * len(layer.modules)
        patterns = versions.matches_fused_names() or len(layer.modules) == 1
        whole = self._ignored.hold(layer.name, patterns=patterns)
        return tuple(whole or self._ignored.hold(module) for module in layer.modules)

    def quantizes(self, layer: EngineLayer) -> bool:
        """Returns True if vLLM loads the layer in the scheme."""
        named = "Linear" in self._scheme.targets or self._targets.hold(layer.name)
        return not any(self.ignored(layer)) and (named or all(map(self._targets.hold, layer.modules)))


class _ModuleList:
    """A list of modules in config.json."""

    def __init__(self, names: Iterable[str], scheme: QuantizationScheme) -> None:
        self._names = frozenset(names)
        patterns = (name.removeprefix("re:") for name in self._names if name.startswith("re:"))
        self._patterns = [re.compile(pattern) for pattern in patterns if scheme.method != "fp8"]

    def hold(self, module: str, *, patterns: bool = True) -> bool:
        """Returns True if the list has the name of the module, or one of the `patterns` matches it."""
        found = patterns and any(pattern.match(module) for pattern in self._patterns)
        return module in self._names or found
