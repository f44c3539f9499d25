"""Decides which layers cuDNN's attention computes (`--attention-backend fused`). Imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slime.models.latent import Latent

if TYPE_CHECKING:
    from slime.models.decoder import Decoder, Layer

MOST_DIM = 128
"""Largest head."""
PADDED_ROWS = 1.125
"""Most padded rows per token of sequences with 1,024 tokens or more. Shorter sequences have few rows more, because
batches with too much padding use another kernel."""


def find_model_obstacle(size: int, window: int | None, cap: float | None, *, sinks: bool) -> str | None:
    """Returns why cuDNN's kernels were not written for a layer, or None. `size` is the number of dimensions of a
    head."""
    if size > MOST_DIM or size % 8:
        return f"heads have {size} dimensions, not a multiple of 8 up to {MOST_DIM}"
    parts = {
        "a sliding window": window is not None,
        "capped scores": cap is not None,
        "sinks": sinks,
    }
    special = [name for name, has in parts.items() if has]
    return f"the layer has {' and '.join(special)}" if special else None


def find_layer_obstacle(decoder: Decoder, layer: Layer) -> str | None:
    """Returns `find_model_obstacle` of a layer with softmax attention."""
    size = decoder.head_dim
    if isinstance(layer.attention, Latent):
        size = max(layer.attention.key, layer.attention.value)
    elif layer.kind == "keys_as_values" and decoder.wide is not None:
        size = decoder.wide.head_dim
    return find_model_obstacle(size, layer.window, decoder.attention_cap, sinks=decoder.sinks)
