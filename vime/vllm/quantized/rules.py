"""Checks, before anything starts, that vLLM can load a quantised checkpoint with the engines' parallel sizes.

Without these checks, an engine fails while it loads, or it computes with wrong scales: vLLM gives a fused layer the
scales of whole blocks, and a block that reaches into the next matrix or rank has no separate scale.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from slime.checkpoints.hf_config import read_hf_config, read_tensor_names
from slime.config import Config
from slime.models import family_for
from slime.models.decoder import Hf
from slime.models.quantized.quantization import QuantizationScheme
from slime.records.errors import FlagError
from vime.pool.engine_flags import engine_tensor_parallel, requested_parallel
from vime.vllm import versions
from vime.vllm.quantized.layers import EngineLayer, EngineReading, engine_layers

_SMALLEST_BLOCK = 32
"""The smallest block of fp8 to which vLLM refines the scales of experts."""


@dataclass(frozen=True)
class EngineSplit:
    """The parallel sizes of an engine that decide how it splits a layer."""

    tensor: int
    data: int
    spreads_experts: bool
    """Each rank has whole experts (--vllm-enable-expert-parallel)."""

    @classmethod
    def from_config(cls, config: Config) -> EngineSplit:
        data = requested_parallel(config, "data_parallel_size") or 1
        spreads = bool(config.engine.backend_args.get("enable_expert_parallel"))
        return cls(engine_tensor_parallel(config), data, spreads)

    def ranks(self, layer: EngineLayer) -> int:
        """Returns the number of ranks that split a layer. Without expert parallelism, data-parallel replicas split the
        experts, too."""
        if layer.split == "nothing":
            return 1
        if layer.is_expert:
            return 1 if self.spreads_experts else self.tensor * self.data
        return 1 if "shared_expert" in layer.name and self.copies_shared_experts else self.tensor

    @property
    def copies_shared_experts(self) -> bool:
        """Returns True if each rank may have the whole shared experts, as vLLM has with some exchanges of tokens."""
        return self.spreads_experts and self.tensor > 1 and self.data > 1


@dataclass(frozen=True)
class Misfit:
    """A part of a layer that is no whole number of blocks."""

    module: str
    axis: str
    width: int
    ranks: int
    block: int
    is_expert: bool = False

    def __str__(self) -> str:
        if self.ranks == 1:
            return f"{self.width} {self.axis} in {self.module}"
        return f"{self.width} {self.axis} / {self.ranks} = {self.width / self.ranks:g} in {self.module}"


def check_quantized_checkpoint(config: Config) -> None:
    """Checks that vLLM reads the same scheme as in the checkpoint's files, and that ranks have whole blocks."""
    if not config.num_engines:
        return
    checkpoint = config.rollout.hf_checkpoint
    hf = read_hf_config(checkpoint)
    scheme = family_for(hf).scheme(hf)
    if scheme is None:
        return
    engine = EngineSplit.from_config(config)
    _check_names(hf, scheme, read_tensor_names(Path(checkpoint)))
    misfit = find_misfit(hf, scheme, engine)
    if misfit is None:
        return
    whole = f"whole {'groups' if scheme.kind == 'int4' else 'blocks'} of {misfit.block}"
    if misfit.ranks == 1:
        raise FlagError(
            "--hf-checkpoint",
            f"have {whole} in each matrix that vLLM loads in {scheme.title}",
            str(misfit),
            "quantise it again without this module, or use a checkpoint in bfloat16",
        )
    divisors = (n for n in range(engine.tensor - 1, 0, -1) if engine.tensor % n == 0)
    fits = next(
        (
            n
            for n in divisors
            if not find_misfit(hf, scheme, EngineSplit(n, engine.data, engine.spreads_experts))
        ),
        None,
    )
    one_group = engine.tensor == config.cluster.rollout_num_gpus_per_engine
    more = ", or add --vllm-enable-expert-parallel" if misfit.is_expert else ""
    raise FlagError(
        "--rollout-num-gpus-per-engine" if one_group else "--vllm-tensor-parallel-size",
        f"leave {whole} of {scheme.title} on each GPU",
        str(misfit),
        f"use {'a checkpoint in bfloat16' if fits is None else fits}{more}",
    )


def _check_names(hf: Hf, scheme: QuantizationScheme, names: set[str] | None) -> None:
    """Checks that vLLM reads each layer as quantised or as plain, as the files have it. `names` has the tensors of the
    files, or None for a checkpoint that has only JSON files."""
    reading = EngineReading(scheme)
    key = f"{'modules_to_not_convert' if scheme.method == 'fp8' else 'ignore'} in config.json of --hf-checkpoint"
    for layer in engine_layers(hf, 1):
        ignored = reading.ignored(layer)
        if len(set(ignored)) > 1:
            raise FlagError(
                key,
                f"name all or none of {', '.join(layer.modules)}, which vLLM loads as one layer",
                f"only {layer.modules[ignored.index(True)]}",
                "quantise the checkpoint again with one form for all of them",
            )
        if names is None:
            continue
        quantized = reading.quantizes(layer)
        for module in layer.modules:
            has_scales = f"{module}.{scheme.scale}" in names
            if has_scales is not quantized and (has_scales or f"{module}.weight" in names):
                raise FlagError(
                    key,
                    "name each module that is plain in the files, and no other module",
                    f"{module}, which is {'quantised' if has_scales else 'plain'} in the files and "
                    f"{'quantised' if quantized else 'plain'} for vLLM",
                    f"{'remove it from' if has_scales else 'add its whole name to'} the list",
                )


def find_misfit(hf: Hf, scheme: QuantizationScheme, engine: EngineSplit) -> Misfit | None:
    reading = EngineReading(scheme)
    layers = (layer for layer in engine_layers(hf, engine.tensor) if reading.quantizes(layer))
    return next((found for layer in layers for found in misfits(layer, scheme, engine)), None)


def misfits(layer: EngineLayer, scheme: QuantizationScheme, engine: EngineSplit) -> Iterator[Misfit]:
    """Yields the parts of a layer that are no whole number of blocks on a rank. vLLM needs whole blocks in the axis
    that ranks split. In a fused layer it needs whole blocks of rows, except in the last part of a layer that ranks do
    not split."""
    ranks, (by_row, by_column) = engine.ranks(layer), scheme.block
    if layer.is_expert and scheme.kind != "int4":
        yield from _expert_misfits(layer, scheme, ranks)
        return
    if layer.split == "columns" and ranks > 1 and by_column and layer.columns % (ranks * by_column):
        yield Misfit(layer.modules[0], "columns", layer.columns, ranks, by_column, layer.is_expert)
    split = layer.split == "rows" and ranks > 1
    if by_row <= 1 or not (split or len(layer.rows) > 1):
        return
    for number, rows in enumerate(layer.rows):
        is_last = number == len(layer.rows) - 1
        if rows % ((ranks if split else 1) * by_row) and (split or not is_last):
            module = layer.modules[min(number, len(layer.modules) - 1)]
            yield Misfit(module, "rows", rows, ranks if split else 1, by_row)


def _expert_misfits(layer: EngineLayer, scheme: QuantizationScheme, ranks: int) -> Iterator[Misfit]:
    """Yields the width of an expert unless it is whole blocks on a rank, or vLLM can refine the blocks."""
    (by_row, by_column), hidden = scheme.block, layer.columns
    width = layer.rows[0]
    if layer.split != "rows" or by_row <= 1:
        return
    mine, rest = divmod(width, ranks)
    if not rest and mine % by_row == 0 and (ranks == 1 or mine % by_column == 0):
        return
    refines = scheme.method == "fp8" and versions.refines_expert_blocks()
    if rest or not refines or math.gcd(by_row, by_column, mine, hidden) < _SMALLEST_BLOCK:
        yield Misfit(layer.modules[0], "rows", width, ranks, by_row, True)
