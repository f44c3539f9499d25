"""The images and videos of a sample as the trainer reads them, from references or from a plug-in's tensors."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from slime.models.vision import Vision
from slime.vision.inputs import ImageInputs, MediaFile, MediaKind, TrainInputs

_NAMES: dict[MediaKind, tuple[str, str]] = {
    "image": ("pixel_values", "image_grid_thw"),
    "video": ("pixel_values_videos", "video_grid_thw"),
}
"""Kind -> names of the processor's pixels and grids."""


@dataclass(frozen=True)
class Medium:
    """An image or a video. Media with the same `key` have the same pixels."""

    kind: MediaKind
    key: str
    tokens: int
    grid: tuple[int, ...]
    read: Callable[[], Mapping[str, Tensor]]
    """Returns the processor's tensors of this image or video."""
    seconds_per_frame: float = 1.0
    """Seconds between two frames of the grid."""
    start: int | None = None
    """Index of the first of the `tokens` in the sample. None: the first run that is long enough."""


def list_media(inputs: TrainInputs | None, vision: Vision) -> list[Medium]:
    """Returns the images and videos of a sample. Tensors of a plug-in are images, then videos. Raises ValueError if
    their sizes do not fit each other."""
    if inputs is None:
        return []
    if isinstance(inputs, ImageInputs):
        return [_from_file(item) for item in inputs.items]
    return [medium for kind in _NAMES for medium in _from_tensors(kind, inputs, vision)]


def _from_file(item: MediaFile) -> Medium:
    seconds = 1.0
    if item.kind == "video":
        found = item.tensors().get("second_per_grid_ts")
        seconds = 1.0 if found is None else float(found.flatten()[0])
    return Medium(item.kind, item.key, item.tokens, item.grid, item.tensors, seconds, item.start)


def _from_tensors(kind: MediaKind, inputs: Mapping[str, Tensor], vision: Vision) -> Iterator[Medium]:
    pixels_name, grids_name = _NAMES[kind]
    if pixels_name not in inputs:
        return
    pixels = torch.as_tensor(inputs[pixels_name])
    if vision.tokens_per_image is not None:
        for image in pixels:
            yield _part(kind, vision.tokens_per_image, (), {pixels_name: image[None]})
        return
    if grids_name not in inputs:
        raise ValueError(
            f"multimodal_train_inputs must have {grids_name} with {pixels_name}, got {', '.join(inputs)}; keep all "
            "tensors of the processor"
        )
    grids = torch.as_tensor(inputs[grids_name]).long()
    sizes = grids.prod(-1).tolist()
    if sum(sizes) != len(pixels):
        raise ValueError(
            f"{pixels_name} must have one row per patch of {grids_name}, {sum(sizes)}, got {len(pixels)}; keep all "
            "tensors of the processor"
        )
    seconds = inputs.get("second_per_grid_ts") if kind == "video" else None
    for number, (patches, grid) in enumerate(zip(pixels.split(sizes), grids, strict=True)):
        found = {pixels_name: patches, grids_name: grid[None]}
        size = tuple(grid.tolist())
        spacing = 1.0 if seconds is None else float(seconds[number])
        if seconds is not None:
            found["second_per_grid_ts"] = torch.tensor([spacing])
        yield _part(kind, vision.count_tokens(size), size, found, spacing)


def _part(
    kind: MediaKind,
    tokens: int,
    grid: tuple[int, ...],
    tensors: Mapping[str, Tensor],
    seconds: float = 1.0,
) -> Medium:
    """Returns a medium of a plug-in, whose key is a digest of its tensors."""
    digest = hashlib.blake2b(digest_size=16)
    for name, tensor in tensors.items():
        digest.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
        digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return Medium(kind, digest.hexdigest(), tokens, grid, partial(dict, tensors), seconds)
