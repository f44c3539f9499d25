"""The tensors of the live model on this rank, with their rows of the family's table and their HF names."""

from __future__ import annotations

from collections.abc import Iterator
from weakref import WeakKeyDictionary

import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from slime.megatron_backend.model.gpt import HiddenGPTModel
from slime.megatron_backend.model.parameter_names import find_row
from slime.megatron_backend.model.value_head import PARAMETER as VALUE_HEAD
from slime.models.layouts import Row
from slime.models.lora import PREFIX as ADAPTERS


def named(inner: HiddenGPTModel) -> Iterator[tuple[str, Tensor]]:
    """Yields parameters in model order. A router's weight is followed by its frozen bias, which is a buffer.
    The frozen factors of layers, buffers too, are last."""
    for name, parameter in inner.named_parameters():
        yield name, parameter
        path, router, _ = name.rpartition(".router.weight")
        if router and (bias := inner.get_submodule(f"{path}.router").expert_bias) is not None:
            yield f"{path}.router.expert_bias", bias
    yield from ((name, buffer) for name, buffer in inner.named_buffers() if name.endswith(".layer_scalar"))


def parameters(
    inner: HiddenGPTModel, expert_rank: int | None = None
) -> Iterator[tuple[Tensor, Row, tuple[str, ...]]]:
    """Yields every tensor of this stage with its row of the family's table and its HF names, in model order. With
    `expert_rank`, experts have their names on that expert-parallel rank. A value head and adapters have no row and are
    skipped."""
    for name, parameter in named(inner):
        if name != VALUE_HEAD and not name.startswith(ADAPTERS):
            yield parameter, *find_row(inner, name, expert_rank)


def with_all_experts(
    inner: HiddenGPTModel,
) -> Iterator[tuple[Tensor, Row, list[tuple[str, ...]]]]:
    """Yields every parameter of this stage with its HF names. An expert's parameter has the names on all
    expert-parallel ranks."""
    _, ranks = rank_and_size(parallel_state.get_expert_model_parallel_group())
    for of_ranks in zip(*(parameters(inner, rank) for rank in range(ranks)), strict=True):
        parameter, row, _ = of_ranks[0]
        yield parameter, row, [names for _, _, names in of_ranks[: ranks if row.is_expert else 1]]


Exported = tuple[Tensor, Row, list[tuple[str, ...]]]
"""A parameter, its row of the family's table, and its HF names on each expert-parallel rank."""
_EXPORTED: WeakKeyDictionary[HiddenGPTModel, list[Exported]] = WeakKeyDictionary()


def exported(inner: HiddenGPTModel) -> list[Exported]:
    """Returns the parameters of this stage, without the copy of the embedding for a tied head.

    The list is computed once per model, because each export needs it: Qwen3-30B-A3B has 18,867 HF names.
    """
    if inner not in _EXPORTED:
        # Megatron marks the embedding's copy
        _EXPORTED[inner] = [each for each in with_all_experts(inner) if not getattr(each[0], "shared", False)]
    return _EXPORTED[inner]


def hf_parts(parameter: Tensor, row: Row, inner: HiddenGPTModel) -> list[Tensor]:
    """Returns the HF tensors of a parameter on the meta device, for their shapes."""
    _, size = rank_and_size(shard_group(row))
    return row.layout.split(row.layout.merge([parameter.data.to("meta")] * size), inner.sizes)


def shard_group(row: Row) -> dist.ProcessGroup:
    """Returns the group of ranks that have the shards of a row's parameter."""
    group: dist.ProcessGroup = (
        parallel_state.get_expert_tensor_parallel_group()
        if row.is_expert
        else parallel_state.get_tensor_model_parallel_group()
    )
    return group


def rank_and_size(group: dist.ProcessGroup) -> tuple[int, int]:
    return group.rank(), group.size()
