"""Collects the whole tensors of the live model from tensor- and expert-parallel ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from slime.megatron_backend.checkpoint.live_table import Exported, shard_group
from slime.models.layouts import Row

_EXCHANGE_BYTES = 1 << 27
"""Most bytes that a rank gets in one exchange, unless one expert is larger."""


def batch_experts(parameters: Iterable[Exported], ranks: int) -> Iterator[list[Exported]]:
    """Yields the parameters in order, several consecutive experts at a time. One exchange for a few experts is faster
    than an exchange per expert."""
    batch: list[Exported] = []
    size = 0
    for each in parameters:
        tensor, _, names_of_ranks = each
        size += tensor.nbytes * ranks
        alike = batch and len(names_of_ranks) > 1 and _kind(batch[0]) == _kind(each)
        if batch and not (alike and size <= _EXCHANGE_BYTES):
            yield batch
            batch, size = [], tensor.nbytes * ranks
        batch.append(each)
    if batch:
        yield batch


def _kind(exported: Exported) -> tuple[int, torch.dtype]:
    tensor, _, names_of_ranks = exported
    return len(names_of_ranks), tensor.dtype


def merge_shards(values: Tensor, parameter: Tensor, row: Row) -> Tensor:
    """Returns all of a parameter that tensor-parallel ranks share. Collective over these ranks."""
    shards = shard_group(row)
    if shards.size() > 1 and getattr(parameter, "tensor_model_parallel", False):
        return row.layout.merge(gathered(values, shards))
    return values


def gather_together(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> list[tuple[Tensor, ...]]:
    """Returns, for each tensor, its values on every rank in rank order. Collective. Shapes and dtypes are equal on all
    ranks."""
    together = torch.cat([tensor.to(torch.cuda.current_device()).flatten() for tensor in tensors])
    sizes = [tensor.numel() for tensor in tensors]
    of_ranks = [found.split(sizes) for found in gathered(together, group)]
    return [
        tuple(part.view(tensor.shape) for part in parts)
        for tensor, parts in zip(tensors, zip(*of_ranks, strict=True), strict=True)
    ]


def gathered(tensor: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    """Returns the tensors of every rank in `group`, in rank order. Collective."""
    mine = tensor.contiguous().to(torch.cuda.current_device())
    found = mine.new_empty(group.size() * mine.numel())
    dist.all_gather_into_tensor(found, mine.flatten(), group=group)
    return list(found.view(group.size(), *mine.shape).unbind())
