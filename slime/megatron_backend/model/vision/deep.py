"""Adds the tower's rows for the first decoder layers (DeepStack, 2406.04334) to the outputs of these layers."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def add_deep(hidden: Tensor, layout: Any, layer: int) -> Tensor:
    """Returns the output [p, 1, H] of decoder layer `layer`, from 0, plus the rows of images for this layer."""
    if layer >= len(layout.deep):
        return hidden
    return hidden.index_add(0, layout.deep_rows, layout.deep[layer][:, None])
