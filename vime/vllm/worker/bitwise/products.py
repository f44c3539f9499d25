"""Defines the products of vLLM's linear layers with the operators of `rl_kernel.invariant`, and the gather of ranks."""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from vllm.distributed import tensor_model_parallel_all_gather
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

import rl_kernel.invariant as invariant
from rl_kernel import fp8


class _Product:
    """Matrix product of a layer with our operator. The weight stays a plain matrix, which vLLM would pack on CPUs."""

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        pass

    @classmethod
    def multiply(cls, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Returns the product with the engine's operator."""
        return invariant.linear(x, weight, bias)

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return self.multiply(x, layer.weight, bias)


class LinearMethod(_Product, UnquantizedLinearMethod):
    """Method of a linear layer. With `fp8_scales` of `EngineSettings`, the layer computes in fp8 as in the trainer: the
    weight is rounded for each product, so an update needs no separate step."""

    fp8_scales: ClassVar[str | None] = None

    @classmethod
    def multiply(cls, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if cls.fp8_scales is None:
            return invariant.linear(x, weight, bias)
        out = fp8.linear(x, weight, power_of_two=cls.fp8_scales == "ue8m0", invariant=True)
        return out if bias is None else out + bias

    @classmethod
    def choose_product(cls) -> invariant.Multiply:
        """Returns the product for sums over ranks or experts."""
        if cls.fp8_scales is None:
            return invariant.plain_product
        return partial(fp8.multiply, power_of_two=cls.fp8_scales == "ue8m0")


class HeadMethod(_Product, UnquantizedEmbeddingMethod):
    """Method of an embedding as the output layer. vLLM looks up the embedding's rows."""


def gather_ranks(part: Tensor) -> Tensor:
    """Gathers each rank's [N, M] into [R, N, M], bit for bit. The transfer is in float32, because vLLM's gather on CPUs
    has no float64."""
    gathered = tensor_model_parallel_all_gather(part.contiguous().view(torch.float32), dim=0)
    return gathered.view(part.dtype).view(-1, *part.shape)
