"""Adapters of Megatron's products: `y += scale * x @ A.T @ B.T`, with PEFT's A and B for each Hugging Face module.

Megatron fuses modules: queries, keys and values are one product with interleaved rows. Each module keeps a separate A
and B, so that PEFT directories load and save without loss. Tensor-parallel ranks split them as they split the product:

    columns split (row of the weight table with axis 0)   A whole, B split by rows
    rows split (axis 1)                                   A split by columns, B whole
    whole                                                 both whole

With sequence parallelism, matrices that see only a rank's own tokens are marked, and Megatron sums their gradients.

Shapes: T tokens, K inputs, N outputs, r rank, E experts of this rank, C (token, expert) pairs sorted by expert.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    get_cuda_rng_tracker,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from torch import Tensor, nn
from torch.nn.functional import dropout, linear

from slime.megatron_backend.model.moe.grouped_product import GroupedProduct
from slime.models.lora import Lora

Read = Callable[[Tensor], Tensor]
"""Returns the values of a parameter from any device (slime.megatron_backend.step.residence)."""


@dataclass(frozen=True)
class Slot:
    """A Hugging Face module in a product: the rows of the module on this rank.

    `first` and `rows` bound the module's outputs on this rank. `outputs` and `inputs` are the module's full sizes.
    """

    module: str
    """Name of the module, with "{e}" for the number of an expert."""
    outputs: int
    inputs: int
    first: int
    rows: int


def matrix(
    value: Tensor, axis: int | None, *, own_tokens: bool = False, expert: Tensor | None = None
) -> nn.Parameter:
    """Returns A or B of a module, with the marks that Megatron reads. `axis` is the axis that tensor-parallel ranks
    split; this file and export read it. `own_tokens` means that its gradient covers only this rank's part of the
    tokens. `expert` is the base's weight if it belongs to an expert, whose replicas are on other ranks than those of
    the rest of the model."""
    made: Any = nn.Parameter(value)
    made.axis, made.sequence_parallel = axis, own_tokens
    # each rank has its own experts, and the norm of the gradient counts all experts
    made.tensor_model_parallel = axis is not None or expert is not None
    made.partition_dim, made.partition_stride = -1 if axis is None else axis, 1
    if expert is not None:
        made.allreduce = getattr(expert, "allreduce", True)
    parameter: nn.Parameter = made
    return parameter


_EXCHANGES: dict[tuple[int | None, bool], Callable[[Tensor], Tensor]] = {
    (0, False): copy_to_tensor_model_parallel_region,
    (0, True): gather_from_sequence_parallel_region,
    (1, False): reduce_from_tensor_model_parallel_region,
    (1, True): reduce_scatter_to_sequence_parallel_region,
}
"""(axis that ranks split, whether sequences are split) -> exchange that the ranks apply to the products with A."""


class _Adapters(nn.Module):
    """Base class of the adapters of a product: A and B of the slots `targets`, and a switch."""

    def __init__(
        self, lora: Lora, slots: list[Slot], targets: list[int], weights: list[nn.Parameter]
    ) -> None:
        super().__init__()
        self.lora, self.slots, self.targets, self.weights = lora, slots, targets, weights
        self.A, self.B = nn.ParameterList(), nn.ParameterList()
        self.enabled = True

    def added(self, output: Tensor, *inputs: Tensor) -> Tensor:
        """Returns the product's output plus the adapters' output for the `inputs` of `forward`."""
        if not self.enabled:
            return output
        more: Tensor = self(*inputs)
        return output + more

    def matrices(self) -> Iterator[tuple[Slot, Tensor, Tensor]]:
        """Yields slot, A and B per adapted module."""
        for number, a, b in zip(self.targets, self.A, self.B, strict=True):
            yield self.slots[number], a, b


class Adapter(_Adapters):
    """The adapters of a product. Call it with the product's input, and add its output to the product's output.

    `axis` is the axis of the weight table's row. `order` [N] has, for each output of the product, its index in the
    concatenated outputs of `slots`, in the order of the table. None means that they are already in order. `targets` are
    the indices of the slots that have an adapter.
    """

    def __init__(
        self,
        lora: Lora,
        slots: list[Slot],
        targets: list[int],
        weight: nn.Parameter,
        *,
        axis: int | None,
        order: Tensor | None,
        sequence: bool,
    ) -> None:
        super().__init__(lora, slots, targets, [weight])
        self.axis, self.sequence, self.order = axis, sequence, order
        ranks = parallel_state.get_tensor_model_parallel_world_size() if axis == 1 else 1
        for slot in (slots[n] for n in targets):
            a = weight.data.new_empty(lora.rank, slot.inputs // ranks)
            b = weight.data.new_empty(slot.rows, lora.rank)
            self.A.append(matrix(a, 1 if axis == 1 else None, own_tokens=sequence and axis != 1))
            self.B.append(matrix(b, 0 if axis == 0 else None, own_tokens=sequence and axis != 0))

    def forward(self, x: Tensor) -> Tensor:
        """Maps [T, ..., K] (this rank's part) to [T, ..., N], like the product."""
        x = dropped(x, self.lora.dropout, self.training, per_rank=self.sequence or self.axis == 1)
        inner = linear(x, torch.cat(list(self.A)) if len(self.A) > 1 else self.A[0])
        parts = iter((self._between(inner) * self.lora.scale).split(self.lora.rank, -1))
        made = {n: linear(next(parts), b) for n, b in zip(self.targets, self.B, strict=True)}
        some = next(iter(made.values()))
        outputs = [
            made[n] if n in made else some.new_zeros(*some.shape[:-1], slot.rows)
            for n, slot in enumerate(self.slots)
        ]
        whole = torch.cat(outputs, -1) if len(outputs) > 1 else outputs[0]
        return whole if self.order is None else whole.index_select(-1, self.order)

    def _between(self, inner: Tensor) -> Tensor:
        """Exchanges the products with A, which have few columns, between ranks."""
        exchange = _EXCHANGES.get((self.axis, self.sequence))
        if exchange is None:
            return inner
        return exchange(inner)

    def fill(self, generator_seed: int, name: str) -> None:
        """Sets PEFT's first values: A uniform in +-1 / sqrt(K), B zero. They do not depend on the layout of ranks."""
        rank = parallel_state.get_tensor_model_parallel_rank()
        with torch.no_grad():
            for number, a, b in zip(self.targets, self.A, self.B, strict=True):
                whole = first_values(
                    self.lora.rank, self.slots[number].inputs, generator_seed, f"{name}.{number}"
                )
                width = a.shape[1]
                a.copy_(whole[:, rank * width : (rank + 1) * width] if self.axis == 1 else whole)
                b.zero_()

    @torch.no_grad()
    def delta(self, read: Read, expert: int = 0) -> Tensor:
        """Returns the sum that the adapters add to this rank's part of the product's weight, [N, K] in float32."""
        found = {n: product(read(a), read(b)) for n, a, b in zip(self.targets, self.A, self.B, strict=True)}
        some = next(iter(found.values()))
        rows = [
            found[n] if n in found else some.new_zeros(slot.rows, some.shape[1])
            for n, slot in enumerate(self.slots)
        ]
        whole = torch.cat(rows) * self.lora.scale
        return whole if self.order is None else whole[self.order.to(whole.device)]


class ExpertAdapter(_Adapters):
    """The adapters of a product of a layer's experts, which are computed together. Each rank has whole experts."""

    def __init__(
        self, lora: Lora, slots: list[Slot], targets: list[int], weights: list[nn.Parameter]
    ) -> None:
        super().__init__(lora, slots, targets, weights)
        self.axis, self.experts = None, len(weights)
        for slot in (slots[n] for n in targets):
            a = weights[0].data.new_empty(self.experts, lora.rank, slot.inputs)
            b = weights[0].data.new_empty(self.experts, slot.outputs, lora.rank)
            self.A.append(matrix(a, None, expert=weights[0]))
            self.B.append(matrix(b, None, expert=weights[0]))

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        """Maps [C, K] and the ends of the experts' rows to [C, N]."""
        x = dropped(x, self.lora.dropout, self.training, per_rank=True)
        made = {}
        for n, a, b in zip(self.targets, self.A, self.B, strict=True):
            inner = GroupedProduct.apply(x, ends, *a.unbind()) * self.lora.scale
            made[n] = GroupedProduct.apply(inner, ends, *b.unbind())
        outputs = [
            made[n] if n in made else x.new_zeros(len(x), slot.outputs) for n, slot in enumerate(self.slots)
        ]
        return torch.cat(outputs, -1) if len(outputs) > 1 else outputs[0]

    def fill(self, generator_seed: int, name: str) -> None:
        """Sets the first values as `Adapter.fill` does, for each expert by its number in the whole model."""
        first = parallel_state.get_expert_model_parallel_rank() * self.experts
        with torch.no_grad():
            for number, a, b in zip(self.targets, self.A, self.B, strict=True):
                for e in range(self.experts):
                    a[e].copy_(
                        first_values(
                            self.lora.rank,
                            self.slots[number].inputs,
                            generator_seed,
                            f"{name}.{first + e}.{number}",
                        )
                    )
                b.zero_()

    @torch.no_grad()
    def delta(self, read: Read, expert: int = 0) -> Tensor:
        """Returns the sum for one of this rank's experts, [N, K] in float32."""
        found = {
            n: product(read(a)[expert], read(b)[expert])
            for n, a, b in zip(self.targets, self.A, self.B, strict=True)
        }
        some = next(iter(found.values()))
        rows = [
            found[n] if n in found else some.new_zeros(slot.outputs, slot.inputs)
            for n, slot in enumerate(self.slots)
        ]
        return torch.cat(rows) * self.lora.scale


def product(a: Tensor, b: Tensor) -> Tensor:
    return b.float() @ a.float()


def first_values(rank: int, inputs: int, seed: int, name: str) -> Tensor:
    """Returns the first A [rank, inputs] on the host."""
    generator = torch.Generator().manual_seed((seed * 1_000_003 + zlib.crc32(name.encode())) % 2**63)
    values: Tensor = (torch.rand(rank, inputs, generator=generator) * 2 - 1) / inputs**0.5
    return values


def dropped(x: Tensor, rate: float, training: bool, *, per_rank: bool) -> Tensor:
    """Applies dropout in training. `per_rank` means that tensor-parallel ranks have different elements of x, and draw
    different values."""
    if not rate or not training:
        return x
    if not per_rank:
        return dropout(x, rate)
    with get_cuda_rng_tracker().fork():
        return dropout(x, rate)
