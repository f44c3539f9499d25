"""A product whose whole weight is on each tensor-parallel rank."""

from __future__ import annotations

from collections.abc import Callable

from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.nn.functional import linear

from slime.megatron_backend.model.norms import mark_whole


class WholeLinear(nn.Linear):
    """A product whose whole weight is on each tensor-parallel rank. With sequence parallelism, each rank has a part of
    the tokens, and Megatron sums the marked gradients over the ranks."""

    def __init__(self, config: TransformerConfig, inputs: int, outputs: int, bias: bool) -> None:
        super().__init__(inputs, outputs, bias=bias)
        for parameter in self.parameters():
            mark_whole(parameter, config)
        self._forward_impl: Callable[..., Tensor] = linear
        """Computes the product, as in Megatron's layers."""

    def forward(self, input: Tensor) -> Tensor:
        return self._forward_impl(input, self.weight, self.bias)
