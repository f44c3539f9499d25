"""The processed images and videos of a prompt, as references to files.

A reference is small and can be pickled. The samples of a group share it, and every process of a host maps the same
file, so the host has one copy of the pixels.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from slime.records.errors import FlagError

if TYPE_CHECKING:
    from torch import Tensor

MediaKind = Literal["image", "video"]


@dataclass(frozen=True)
class MediaFile:
    """One processed image or video."""

    kind: MediaKind
    key: str
    """Digest of the content and of the processor's settings. It is the key of an engine's encoder cache too."""
    path: str
    """File in the format safetensors, with the processor's tensors for the image."""
    tokens: int
    """Number of ids that the image has in the prompt."""
    grid: tuple[int, ...] = ()
    """Patches per axis: time, height, width. Empty for a processor without a grid."""
    bytes: int = 0
    """Bytes of the tensors."""
    start: int | None = None
    """Index of the first of these ids in the tokens of a sample. None: `slime.vision.runs` finds it."""

    def tensors(self) -> dict[str, Tensor]:
        """Maps the file. The tensors have the processor's names, and a write to a tensor does not reach the file."""
        from safetensors.torch import load_file

        try:
            return load_file(self.path)
        except FileNotFoundError as error:
            raise FlagError(
                "HF_DATASETS_CACHE",
                "keep the processed images while a run uses them",
                f"no file {self.path} on host {socket.gethostname()}",
                "do not empty the folder during a run; give a process outside the run a folder that the hosts share",
            ) from error


@dataclass(frozen=True)
class ImageInputs:
    """The processed images and videos of one prompt, in the order of the prompt.

    Example::

        inputs = ImageInputs((MediaFile("image", "9f2c", "/cache/9f2c.safetensors", tokens=16, grid=(1, 8, 8)),))
        pixel_values = inputs.tensors()["pixel_values"]
    """

    items: tuple[MediaFile, ...]

    @property
    def keys(self) -> tuple[str, ...]:
        """Returns one digest per image and video."""
        return tuple(item.key for item in self.items)

    @property
    def grids(self) -> tuple[tuple[int, ...], ...]:
        """Returns one grid per image and video."""
        return tuple(item.grid for item in self.items)

    @property
    def bytes(self) -> int:
        """Returns the number of bytes of the tensors."""
        return sum(item.bytes for item in self.items)

    def exist(self) -> bool:
        """Returns true if all files exist."""
        return all(os.path.exists(item.path) for item in self.items)

    def tensors(self) -> dict[str, Tensor]:
        """Returns the inputs of the model's tower under the processor's names. Images follow each other along the
        first axis. The tensors of a prompt with one image are mapped and not copied."""
        return concatenate(item.tensors() for item in self.items)

    def __add__(self, other: ImageInputs) -> ImageInputs:
        """Returns the images of a prompt followed by those of a later turn."""
        return ImageInputs(self.items + other.items)


TrainInputs = ImageInputs | Mapping[str, "Tensor"]
"""Value of `Sample.multimodal_train_inputs`. A plug-in may set the processor's tensors themselves."""


def read_tensors(inputs: TrainInputs | None) -> dict[str, Tensor]:
    """Returns the tensors of a sample's images by name. Empty for a sample without images."""
    if inputs is None:
        return {}
    return inputs.tensors() if isinstance(inputs, ImageInputs) else dict(inputs)


def concatenate(parts: Iterable[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Joins the tensors of several images or samples by name, along the first axis."""
    import torch

    lists: dict[str, list[Tensor]] = {}
    for part in parts:
        for name, tensor in part.items():
            lists.setdefault(name, []).append(tensor)
    return {name: found[0] if len(found) == 1 else torch.cat(found) for name, found in lists.items()}
