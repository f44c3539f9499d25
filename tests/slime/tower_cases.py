"""Samples with random images for tiny models with vision tower, and transformers' logits of these samples."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from family_cases import IMAGE_ID, VIDEO_ID, VISION_END_ID, VISION_START_ID
from torch import Tensor, nn

from slime.data.packing import pack
from slime.megatron_backend.model.attention import packed_layout
from slime.megatron_backend.model.gpt import gather_hidden, stage_output
from slime.megatron_backend.model.model_config import load_hf_config
from slime.models import read_decoder
from slime.models.vision import Vision
from slime.types import TrainData

KEYS = {"image": "images"}
"""--multimodal-keys of the tests."""
TEXT = 90
"""Number of ids that texts use."""
Grids = Sequence[tuple[int, int, int]]
GRIDS: list[Grids] = [[(1, 4, 8)], [], [(1, 6, 4), (1, 4, 4)], [(1, 10, 12)]]
"""The grids of the images per sample. The last image has more than one window of a tower with windows."""


def read_vision(directory: Path) -> Vision:
    vision = read_decoder(load_hf_config(directory)).vision
    assert vision is not None
    return vision


def random_text(count: int, generator: torch.Generator) -> list[int]:
    return torch.randint(0, TEXT, (count,), generator=generator).tolist()


def count_tokens(vision: Vision, grid: tuple[int, int, int]) -> int:
    return vision.tokens_per_image or vision.count_tokens(grid)


def random_pixels(vision: Vision, grid: tuple[int, int, int], generator: torch.Generator) -> Tensor:
    """Returns the pixels of one image. The grid does not count if all images have one size."""
    if vision.tokens_per_image is None:
        patches = grid[0] * grid[1] * grid[2]
        return torch.randn(patches, vision.patch_values, generator=generator)
    size: Any = vision.settings["image_size"]
    return torch.randn(1, 3, size, size, generator=generator)


def make_samples(vision: Vision, grids: Sequence[Grids] = GRIDS, seed: int = 0) -> TrainData:
    """Returns columns of samples, each with 4 tokens of text, its images and 5 response tokens."""
    generator = torch.Generator().manual_seed(seed)
    data: TrainData = {"tokens": [], "response_lengths": [], "multimodal_train_inputs": []}
    for of_sample in grids:
        tokens, pixels = random_text(4, generator), []
        for grid in of_sample:
            pixels.append(random_pixels(vision, grid, generator))
            tokens += [VISION_START_ID, *[IMAGE_ID] * count_tokens(vision, grid), VISION_END_ID]
            tokens += random_text(3, generator)
        inputs = {"pixel_values": torch.cat(pixels)} if pixels else None
        if inputs and vision.tokens_per_image is None:
            inputs["image_grid_thw"] = torch.tensor(of_sample)
        data["tokens"].append(torch.tensor(tokens + random_text(5, generator)))
        data["response_lengths"].append(5)
        data["multimodal_train_inputs"].append(inputs)
    return data


def image_logits(hf: Any, data: TrainData) -> Tensor:
    """Returns transformers' logits [T, V] of all tokens. Differentiable."""
    found = []
    for tokens, inputs in zip(data["tokens"], data["multimodal_train_inputs"], strict=True):
        kinds = (tokens == IMAGE_ID).int() + 2 * (tokens == VIDEO_ID).int()
        kinds_name = "token_type_ids" if hf.config.model_type == "gemma3" else "mm_token_type_ids"
        more = {} if inputs is None else {**inputs, kinds_name: kinds[None]}
        found.append(hf(input_ids=tokens[None], **more).logits[0])
    return torch.cat(found)


def image_hidden(
    model: nn.Module, data: TrainData, vision: Vision | None, info: Any = None, **options: Any
) -> Tensor:
    """Returns this project's hidden states [P, H] of this rank's tokens of all samples, packed in one row."""
    place = {"cp_rank": info.cp_rank, "cp_size": info.cp_size} if info is not None else {}
    samples = list(range(len(data["tokens"])))
    device = next(model.parameters()).device
    batch = pack(data, samples, [], device=device, vision=vision, **place, **options)
    layout = packed_layout(batch.part, device, None if info is None else info.cp_group, batch.images)
    return gather_hidden(model, stage_output(model, batch.tokens, layout))
