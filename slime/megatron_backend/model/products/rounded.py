"""Computes products with weights rounded to the INT4 of a checkpoint (fake quantisation), for quantisation-aware
training.

    y = x @ rounded(W).T        dW = dy.T @ x        dx = dy @ rounded(W)

The gradient passes the rounding unchanged (straight-through estimator, 1308.3432). The parameters stay as the optimizer
leaves them, so updates, checkpoints and exports quantise the same numbers once, with the same function. A product
rounds its weight again in the backward pass, so rounded weights need no memory between both passes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import TypeAlias

import torch
from megatron.core import parallel_state
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.autograd.graph import saved_tensors_hooks

from slime.megatron_backend.model.moe.experts import GatedExperts
from slime.megatron_backend.model.parameter_names import Part, find_row
from slime.megatron_backend.model.products.linear import LinearLayer, linear_layers
from slime.models.quantized.quantization import rounded
from slime.models.quantized.quantized_checkpoint import QuantizedWeights
from slime.models.vision import PREFIX as TOWER

Rounding = Callable[[Tensor], Tensor]
Product = Callable[..., Tensor]
Kept: TypeAlias = Tensor | tuple[torch.Size, tuple[int, ...]]
"""A saved tensor, or the shape and strides of a view of the rounded weight."""


class StraightThrough(torch.autograd.Function):
    """`apply(weight, rounding)` is `rounding(weight)`. The gradient of the result is the gradient of `weight`."""

    @staticmethod
    def forward(ctx: FunctionCtx, weight: Tensor, rounding: Rounding) -> Tensor:
        return rounding(weight)

    @staticmethod
    def backward(ctx: FunctionCtx, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def round_weights(parts: Iterable[Part], weights: QuantizedWeights) -> None:
    """Makes the layers of a model's parts compute with rounded weights, where `weights` has their HF names. `parts`
    have no data-parallel wrappers.

    Raises ValueError for a weight in INT4 that belongs to no linear layer of the trainer.
    """
    for inner in parts:
        found: set[int] = set()
        for layer in linear_layers(inner):
            quantized = [name in weights.names for name in layer.names]
            if not any(quantized):
                continue
            found.update(id(parameter) for parameter in layer.module.parameters())
            rounding = _rounding(layer, quantized, inner, weights)
            if isinstance(layer.module, GatedExperts):
                layer.module.rounding[layer.index] = rounding
            else:
                layer.module._forward_impl = _rounded_product(layer.module._forward_impl, rounding)
        for name, parameter in inner.named_parameters():
            if parameter.dim() == 2 and id(parameter) not in found and not name.startswith(TOWER):
                _check_plain(find_row(inner, name)[1], weights)


def _check_plain(names: tuple[str, ...], weights: QuantizedWeights) -> None:
    for name in names:
        if name in weights.names:
            raise ValueError(
                f"{name} must be a weight that the trainer can round with --round-weights, got {weights.scheme.title} "
                "for a weight outside the linear layers; add its module to `ignore` in quantization_config, and store "
                "it in plain form"
            )


def _rounding(layer: LinearLayer, quantized: list[bool], inner: Part, weights: QuantizedWeights) -> Rounding:
    """Returns the function that rounds the layer's weights, with any number of axes before the matrix. If the file has
    some of the weight's tensors in plain form, their rows are not rounded."""
    layout = layer.row.layout
    plain = None if all(quantized) else _mark_plain_rows(layer, quantized, inner)

    def rounding(weight: Tensor) -> Tensor:
        matrix = layout.columns(weight.flatten(0, -2))
        values = rounded(matrix, weights.scheme, name=layer.names[0], scale_dtype=weights.scale_dtype)
        values = layout.columns(values).reshape(weight.shape)
        return values if plain is None else torch.where(plain.to(weight.device), weight, values)

    return rounding


def _mark_plain_rows(layer: LinearLayer, quantized: list[bool], inner: Part) -> Tensor:
    """Returns [N, 1], True for the rows of this rank's weight that the files have in plain form."""
    layout, expert = layer.row.layout, layer.row.is_expert
    group = (
        parallel_state.get_expert_tensor_parallel_group()
        if expert
        else parallel_state.get_tensor_model_parallel_group()
    )
    whole = layout.merge([layer.weight.data.to("meta")] * group.size())
    rows = [part.shape[0] for part in layout.split(whole, inner.sizes)]
    marks = [torch.full((n, 1), not each) for n, each in zip(rows, quantized, strict=True)]
    return layout.shard(layout.join(marks, inner.sizes), group.rank(), group.size())


def _rounded_product(product: Product, rounding: Rounding) -> Product:
    """Returns the function that computes `product` with the rounded weight."""

    def compute(input: Tensor, weight: Tensor, *args: object, **kwargs: object) -> Tensor:
        values: Tensor = StraightThrough.apply(weight, rounding)
        keep, get = _forget(values, partial(rounding, weight.detach()))
        if "gradient_accumulation_fusion" in kwargs:
            kwargs["gradient_accumulation_fusion"] = False  # the rounded weight has no gradient buffer
        with saved_tensors_hooks(keep, get):
            return product(input, values, *args, **kwargs)

    return compute


def _forget(
    values: Tensor, again: Callable[[], Tensor]
) -> tuple[Callable[[Tensor], Kept], Callable[[Kept], Tensor]]:
    """Returns hooks for saved tensors that do not keep views of all `values`, and compute them again when the backward
    needs them."""
    storage, size = values.untyped_storage().data_ptr(), values.numel()

    def keep(saved: Tensor) -> Kept:
        if saved.untyped_storage().data_ptr() != storage or saved.numel() != size:
            return saved
        return saved.shape, saved.stride()

    def get(kept: Kept) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        with torch.no_grad():
            return again().as_strided(*kept)

    return keep, get
