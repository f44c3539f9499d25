"""Adds the tower's rows for the first decoder layers (DeepStack, 2406.04334) to the outputs of these layers."""

from __future__ import annotations

from torch import Tensor

from slime.megatron_backend.model.attention import PackedLayout


def add_deep(hidden: Tensor, layout: PackedLayout, layer: int) -> Tensor:
    """Returns the output [p, 1, H] of decoder layer `layer`, from 0, plus the rows of images for this layer."""
    if layer >= len(layout.deep):
        return hidden
    assert layout.deep_rows is not None
    return hidden.index_add(0, layout.deep_rows, layout.deep[layer][:, None])
