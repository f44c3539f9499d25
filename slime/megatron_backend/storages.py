"""The storages of a trained role's state: parameters, gradients, main weights and moments."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor, nn

ALIGNMENT = 512
"""Alignment in bytes of a storage in a host copy. It fits every dtype and divides the page size."""


@dataclass(frozen=True)
class StoragePiece:
    """A storage, its size in bytes, and its offset in a host copy."""

    storage: torch.UntypedStorage
    nbytes: int
    offset: int

    def as_bytes(self) -> Tensor:
        """Returns the storage as a tensor of bytes."""
        empty = torch.empty(0, dtype=torch.uint8, device=self.storage.device)
        return empty.set_(self.storage, 0, (self.nbytes,), (1,))


def iter_pieces(tensors: Iterable[Tensor], seen: set[int]) -> Iterator[StoragePiece]:
    """Yields the storages of `tensors` that are not in `seen`, one after another in a host copy."""
    offset = 0
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage._cdata in seen or storage.nbytes() == 0:
            continue
        seen.add(storage._cdata)
        yield StoragePiece(storage, storage.nbytes(), offset)
        offset += -(-storage.nbytes() // ALIGNMENT) * ALIGNMENT


def iter_parameters(models: list[nn.Module]) -> Iterator[Tensor]:
    for model in models:
        yield from model.parameters()


def iter_gradients(models: list[nn.Module]) -> Iterator[Tensor]:
    """Yields Megatron's flat gradient buffers, for the models that have them."""
    for model in models:
        if isinstance(model, DistributedDataParallel):
            for buffer in [*model.buffers, *model.expert_parallel_buffers]:
                yield buffer.grad_data


def iter_states(optimizer: MegatronOptimizer, *, counts: bool = False) -> Iterator[Tensor]:
    """Yields main weights and moments, in an order that a load does not change. With `counts`, it also yields step
    counts, which are single numbers."""
    for chained in optimizer.chained_optimizers:
        inner = chained.optimizer
        for group in [] if inner is None else inner.param_groups:  # None on a rank without a parameter
            for parameter in group["params"]:
                yield parameter
                values = sorted(inner.state.get(parameter, {}).items())
                yield from (
                    value for _, value in values if isinstance(value, Tensor) and (counts or value.dim())
                )
