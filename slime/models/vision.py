"""The record of a vision tower, which every family with images reads from its config.json.

Trainer, planner, data and rollout read this record and never use a family's name. The module imports neither torch nor
Megatron. A run builds the tower only if its prompts have images (`sees_images`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from slime.models.rope import Hf

if TYPE_CHECKING:
    from slime.config import Config

PREFIX = "vision_model."
"""Prefix of the tower's parameters in the trainer's model."""

MOST_LAYERS = 10_000
"""Largest number of layers of a tower or a decoder. Each layer has a record, so larger numbers would fill the memory of
the host."""

FrameTimes = Literal["seconds", "texts"]
"""The form in which a prompt has the times of a video's frames.

seconds: the frames follow each other, and their positions are the seconds times `frames_per_second`.
texts: a text with the frame's time precedes each frame, and a frame has the positions of an image.
"""


@dataclass(frozen=True)
class Vision:
    """A vision tower with its projector: patches of images -> rows that replace the embeddings of image tokens."""

    kind: str
    """Key of slime.megatron_backend.model.vision.towers.TOWERS."""
    settings: Mapping[str, object]
    """The tower's record in config.json."""
    depth: int
    hidden: int
    ffn: int
    heads: int
    out: int
    """Width of the tower's output, which is the decoder's hidden size."""
    image_id: int
    """Token id that a prompt repeats once per row of an image."""
    video_id: int | None = None
    merge: int = 1
    """Number of patches per side that one token has."""
    patch_values: int = 0
    """Number of values of a patch: channels * frames * height * width."""
    tokens_per_image: int | None = None
    """Number of tokens of each image, for a tower that resizes images to one size. None: an image has a grid."""
    pooled: bool = False
    """The patches of a token are averaged. False: they follow each other in one vector, which has two products."""
    gated: bool = False
    """The tower's MLPs have three matrices instead of two."""
    mergers: int = 1
    """Number of projectors: the one of the output, and those of `deepstack`."""
    deepstack: int = 0
    """Number of first decoder layers whose output gets rows of the tower added."""
    window: int | None = None
    """Number of patches that attend to each other in most layers. None: all patches of a frame in all layers."""
    whole_layers: int = 0
    """Number of layers that attend to all patches of a frame, for a tower with windows."""
    frame_times: FrameTimes = "seconds"
    frames_per_second: float = 1.0
    axes: bool = True
    """Image tokens have rotary positions in three axes: time, height, width."""
    sees_whole_image: bool = False
    """A token of an image attends to all tokens of this image, also to later ones."""
    files: tuple[str, ...] = ()
    """Prefixes of the tower's tensors in files."""
    block_weight: str = "blocks.0.attn.qkv.weight"
    """Name of a matrix of the first block in the trainer, without `PREFIX`."""

    def __post_init__(self) -> None:
        if type(self.depth) is not int or not 1 <= self.depth <= MOST_LAYERS:
            raise ValueError(
                f"the number of layers in vision_config of config.json must be a number from 1 to {MOST_LAYERS:,}, got "
                f"{self.depth!r}; download the checkpoint again"
            )

    def count_tokens(self, grid: tuple[int, ...]) -> int:
        """Returns the number of tokens of an image or video with `grid` patches (time, height, width)."""
        time, height, width = grid
        return time * height * width // self.merge**2


def sees_images(config: Config) -> bool:
    """Returns whether the run's prompts may have images, so that the trainer builds the vision tower."""
    return bool(config.data.multimodal_keys)


def vision_record(hf: Hf) -> Hf:
    """Returns the tower's record in config.json. Raises ValueError for a checkpoint without a tower."""
    record = hf.get("vision_config")
    if not isinstance(record, Mapping):
        raise ValueError(
            f"config.json must give vision_config for model_type {hf.get('model_type')}, got {record!r}; the "
            "checkpoint is incomplete"
        )
    return record
