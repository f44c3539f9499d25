"""Compares the trainer's rotary positions of samples with images and videos with transformers' `get_rope_index`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from family_cases import IMAGE_ID, TINY, VIDEO_ID, VISION_END_ID, VISION_START_ID, multimodal
from torch import Tensor

from slime.data.media.packing import SampleImages, pack_images
from slime.models import read_decoder
from slime.models.vision import Vision

KINDS = ("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
IMAGES = [(1, 4, 6), (1, 8, 4)]
VIDEOS = [(3, 12, 8), (2, 4, 16), (1, 6, 6)]
SECONDS = [0.5, 1.3, 1.0]


@pytest.fixture(scope="module", params=KINDS)
def model(request: pytest.FixtureRequest) -> tuple[Any, Vision]:
    """Returns transformers' model without weights, and the record of its tower."""
    text = {"vocab_size": 99, "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 1}
    text |= {"num_key_value_heads": 2, "tie_word_embeddings": True, "intermediate_size": 96} | TINY[
        request.param
    ]
    config = transformers.AutoConfig.for_model(request.param, **multimodal(request.param, text))
    with torch.device("meta"):
        hf = transformers.AutoModelForImageTextToText.from_config(config)
    fields = config.to_dict()
    vision = read_decoder({**fields["text_config"], **fields}).vision
    assert vision is not None
    return hf.model, vision


def one(token: int, count: int) -> list[int]:
    return [1, 2, VISION_START_ID, *[token] * count, VISION_END_ID]


def sample(
    vision: Vision, videos: list[tuple[int, int, int]], seconds: list[float]
) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns the tokens of a sample with images between its videos, and the processor's tensors."""
    tokens = [3, 4, 5]
    for number, grid in enumerate(videos):
        if number < len(IMAGES):
            tokens += one(IMAGE_ID, vision.count_tokens(IMAGES[number]))
        frames = grid[0] if vision.frame_times == "texts" else 1
        for _ in range(frames):
            tokens += one(VIDEO_ID, vision.count_tokens(grid) // frames)
    found = IMAGES[: len(videos)]

    def pixels(grids: list[tuple[int, int, int]]) -> Tensor:
        return torch.zeros(sum(t * h * w for t, h, w in grids), vision.patch_values)

    inputs = {
        **{"pixel_values": pixels(found), "image_grid_thw": torch.tensor(found)},
        **{"pixel_values_videos": pixels(videos), "video_grid_thw": torch.tensor(videos)},
        "second_per_grid_ts": torch.tensor(seconds),
    }
    return torch.tensor([*tokens, 6, 7]), inputs


def positions(vision: Vision, tokens: Tensor, inputs: dict[str, Tensor]) -> Tensor:
    """Returns the trainer's positions [3, T] of a packed row with the sample between two others of text."""
    text = SampleImages.find(torch.arange(5), 3, None, vision, "sample 0")
    images = SampleImages.find(tokens, len(tokens) - 2, inputs, vision, "sample 1")
    total = len(tokens) + 10
    packed = pack_images([text, images, text], vision, torch.arange(total), total)
    assert packed is not None and packed.positions is not None
    assert torch.equal(packed.positions[:, :5], torch.arange(5).expand(3, 5))
    assert torch.equal(packed.positions[:, -5:], torch.arange(5).expand(3, 5))
    return packed.positions[:, 5:-5]


def transformers_positions(hf: Any, tokens: Tensor, inputs: dict[str, Tensor]) -> Tensor:
    kinds = (tokens == IMAGE_ID).int() + 2 * (tokens == VIDEO_ID).int()
    grids = {name: value for name, value in inputs.items() if not name.startswith("pixel")}
    found: Tensor = hf.get_rope_index(tokens[None], mm_token_type_ids=kinds[None], **grids)[0]
    return found[:, 0]


def test_positions_of_videos_are_those_of_transformers(model: tuple[Any, Vision]) -> None:
    hf, vision = model
    tokens, inputs = sample(vision, VIDEOS, SECONDS)
    found = positions(vision, tokens, inputs)
    assert torch.equal(found, transformers_positions(hf, tokens, inputs))
    if vision.frame_times == "seconds":
        others = positions(vision, tokens, inputs | {"second_per_grid_ts": torch.tensor([1.0, 1.3, 1.0])})
        assert not torch.equal(found, others), "the times of the frames are in the positions"


def test_the_text_after_a_long_video_follows_its_largest_position(model: tuple[Any, Vision]) -> None:
    """vLLM's positions for a video of Qwen2.5-VL that is longer than its sides. transformers' differ from there on."""
    hf, vision = model
    tokens, inputs = sample(vision, [(9, 4, 4)], [2.0])
    found, wanted = positions(vision, tokens, inputs), transformers_positions(hf, tokens, inputs)
    if vision.frame_times == "texts":
        assert torch.equal(found, wanted)
        return
    last = int(torch.nonzero(tokens == VIDEO_ID)[-1])
    assert torch.equal(found[:, : last + 1], wanted[:, : last + 1])
    assert found[:, last + 1].tolist() == [int(found[:, : last + 1].max()) + 1] * 3
