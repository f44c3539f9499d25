"""The linear layers of a model's part with their rows of the family's table.

Megatron's layers call `_forward_impl(input=, weight=, ...)` for the product, and `WholeLinear` does the same. A
function that changes the operands of a product wraps this attribute of a layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from torch import Tensor

from slime.megatron_backend.model.latent.whole_linear import WholeLinear
from slime.megatron_backend.model.moe.experts import GatedExperts
from slime.megatron_backend.model.parameter_names import Part, find_row
from slime.models.layouts import Row

Owner: TypeAlias = Any
"""A layer of Megatron, which has no types, or a WholeLinear."""
LAYERS = (ColumnParallelLinear, RowParallelLinear, WholeLinear)
"""Layers that compute one product, with `_forward_impl`."""
_EXPERT_PRODUCTS = ("linear_fc1", "linear_fc2")


@dataclass(frozen=True)
class LinearLayer:
    """A layer that computes products, or one of the two grouped products of a layer's experts."""

    module: Owner
    """A ColumnParallelLinear, RowParallelLinear or WholeLinear, or the GatedExperts."""
    index: int
    """Number of the product in GatedExperts: 0 for gate and up, 1 for down. 0 for other layers."""
    weight: Tensor
    """The weight [N, K] on this rank. For experts, the one of the rank's first expert."""
    row: Row
    names: tuple[str, ...]
    """HF names of the weight, or of the first expert's weight."""


def linear_layers(inner: Part) -> Iterator[LinearLayer]:
    """Yields the linear layers of a part that is not wrapped, in model order. They include a head that does not share
    its weight with the embedding."""
    for path, module in inner.named_modules():
        if isinstance(module, GatedExperts):
            for index, name in enumerate(_EXPERT_PRODUCTS):
                weight = getattr(module.local_experts[0], name).weight
                found = find_row(inner, f"{path}.local_experts.0.{name}.weight")
                yield LinearLayer(module, index, weight, *found)
        elif ".local_experts." not in path and isinstance(module, LAYERS) and module.weight is not None:
            yield LinearLayer(module, 0, module.weight, *find_row(inner, f"{path}.weight"))
