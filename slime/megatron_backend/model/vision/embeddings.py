"""Puts the tower's output into the decoder: its rows replace the embeddings of image tokens, and rows for the first
decoder layers (DeepStack) are added to the outputs of these layers.

With sequence parallelism, each tensor-parallel rank has the embeddings of its part of the rows. All ranks compute the
whole tower, so a rank takes the rows of its part, and the backward adds up the ranks' gradients. Then the tower has the
same gradient on all ranks.

Shapes: P rows of a micro-batch, p rows of this rank, k image tokens among them, F rows of the tower, H hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region
from torch import Tensor, nn

from slime.data.media.media import Medium
from slime.data.media.packing import PackedImages
from slime.megatron_backend.model.attention import PackedLayout
from slime.megatron_backend.model.vision.towers import TowerOutput, make_one_image, run_tower
from slime.models.vision import Vision
from slime.vision.inputs import concatenate


def embed_images(
    embedded: Tensor, layout: PackedLayout, vision: Vision, tower: nn.Module, *, sequence_parallel: bool
) -> Tensor:
    """Returns `embedded` [p, 1, H] with the tower's rows at the image tokens, and stores the rows for the first decoder
    layers in `layout`. Raises ValueError if the number of the tower's rows does not fit the images.

    A tower that is trained runs in each micro-batch, because --overlap-grad-reduce waits for its gradients. Without
    images, it computes one empty image, and the output is multiplied by 0. A frozen tower keeps its output in a cache.
    """
    images = layout.images
    trained = torch.is_grad_enabled() and any(parameter.requires_grad for parameter in tower.parameters())
    if images is None or not images.media:
        return embedded + _nothing(vision, tower) if trained else embedded
    output = _run(vision, tower, images, embedded.device)
    rows, features = images.rows, images.features
    if sequence_parallel:
        rows, features = _local(rows, features, len(embedded))
    parts = [_chosen(part, features, embedded, sequence_parallel) for part in (output.rows, *output.deep)]
    layout.deep_rows = rows
    layout.deep = tuple(part.detach().requires_grad_(part.requires_grad) for part in parts[1:])
    embedded = embedded.index_copy(0, rows, parts[0][:, None])
    if any(part.requires_grad for part in parts[1:]):
        embedded = _WithDeep.apply(embedded, layout.deep, *parts[1:])
    return embedded


def _run(vision: Vision, tower: nn.Module, images: PackedImages, device: torch.device) -> TowerOutput:
    """Returns the tower's output for the images of a micro-batch. A frozen tower computes the images that its cache
    does not have."""
    cache, found = images.cache, {}
    if cache is None or any(parameter.requires_grad for parameter in tower.parameters()):
        return _run_all(vision, tower, images.media, device)
    for medium in images.media:
        if (stored := cache.find(tower, medium.key)) is not None:
            found[medium.key] = [part.to(device) for part in stored]
    missing = [medium for medium in images.media if medium.key not in found]
    if missing:
        output = _run_all(vision, tower, missing, device)
        parts = (part.split([medium.tokens for medium in missing]) for part in (output.rows, *output.deep))
        for medium, *rows in zip(missing, *parts, strict=True):
            cache.add(tower, medium.key, rows)
            found[medium.key] = rows
    joined = [torch.cat(parts) for parts in zip(*(found[medium.key] for medium in images.media), strict=True)]
    return TowerOutput(joined[0], tuple(joined[1:]))


def _run_all(vision: Vision, tower: nn.Module, media: Sequence[Medium], device: torch.device) -> TowerOutput:
    """Returns the tower's output for images. Raises ValueError unless it has a row per token of the images."""
    pixels = concatenate(medium.read() for medium in media)
    output = run_tower(vision, tower, {name: tensor.to(device) for name, tensor in pixels.items()})
    wanted = sum(medium.tokens for medium in media)
    if len(output.rows) != wanted:
        raise ValueError(
            f"the vision tower must return a row per image token, {wanted}, got {len(output.rows)}; the processor's "
            "tensors and the tokens are of different images"
        )
    return output


def _nothing(vision: Vision, tower: nn.Module) -> Tensor:
    """Returns 0 that depends on all parameters of the tower."""
    output = run_tower(vision, tower, make_one_image(vision, torch.cuda.current_device()))
    total: Tensor = sum(part.sum() for part in (output.rows, *output.deep))  # type: ignore[assignment]
    return 0 * total


def _local(rows: Tensor, features: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Returns the part of the image tokens that is in this rank's `size` rows."""
    row = rows - parallel_state.get_tensor_model_parallel_rank() * size
    mine = (row >= 0) & (row < size)
    return row[mine], features[mine]


def _chosen(part: Tensor, features: Tensor, embedded: Tensor, sequence_parallel: bool) -> Tensor:
    """Returns the tower's rows of this rank's image tokens, [k, H]."""
    if sequence_parallel:
        part = copy_to_tensor_model_parallel_region(part)
    return part.index_select(0, features).to(embedded.dtype)


class _WithDeep(torch.autograd.Function):
    """Returns its first argument. Its backward runs after the backward of all decoder layers, and gives the tower the
    gradients of `leaves`. Until then, recomputed layers may add to these gradients in a separate backward."""

    @staticmethod
    def forward(ctx: Any, embedded: Tensor, leaves: tuple[Tensor, ...], *parts: Tensor) -> Tensor:
        ctx.leaves = leaves
        return embedded.view_as(embedded)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        return upstream, None, *(leaf.grad for leaf in ctx.leaves)
