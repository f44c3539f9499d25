"""The places of images and videos in an engine's input, and their rotary positions in vLLM, which are the trainer's."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from slime.data.media.media import Medium
from slime.data.media.positions import find_runs, image_positions
from slime.models.vision import FrameTimes, Vision
from vime.vllm.cpu.vision import with_finder
from vime.vllm.images.engine_input import find_placeholders
from vime.vllm.images.wire import WireImage

IMAGE, VIDEO, OPEN, CLOSE, TEXT = 90, 91, 92, 93, 7
IDS = {"image": IMAGE, "video": VIDEO}
MERGE = 2


def image(rows: int, columns: int) -> tuple[str, tuple[int, int, int], list[int]]:
    return "image", (1, rows, columns), [OPEN, *[IMAGE] * (rows * columns // 4), CLOSE]


def video(times: FrameTimes, frames: int) -> tuple[str, tuple[int, int, int], list[int]]:
    """A video of 4 x 6 patches per frame. With `texts`, a time is before each frame."""
    if times == "texts":
        return "video", (frames, 4, 6), [TEXT, TEXT, OPEN, *[VIDEO] * 6, CLOSE] * frames
    return "video", (frames, 4, 6), [OPEN, *[VIDEO] * (6 * frames), CLOSE]


def vllm_positions(times: FrameTimes, tokens: list[int], features: list[Any]) -> torch.Tensor:
    """Calls vLLM's function of Qwen3-VL or of Qwen2.5-VL."""
    with_finder(sys.meta_path)  # a module of transformers imports torchvision
    from vllm.model_executor.models.qwen2_5_vl import Qwen2_5_VLForConditionalGeneration
    from vllm.model_executor.models.qwen3_vl import Qwen3VLForConditionalGeneration

    tower = SimpleNamespace(spatial_merge_size=MERGE, tokens_per_second=1.0)
    config = SimpleNamespace(
        video_token_id=VIDEO, vision_start_token_id=OPEN, vision_end_token_id=CLOSE, vision_config=tower
    )
    if times == "texts":
        return Qwen3VLForConditionalGeneration._get_mrope_input_positions(tokens, features, config)[0]
    model = SimpleNamespace(config=config)
    model.iter_mm_grid_thw = lambda found: Qwen2_5_VLForConditionalGeneration.iter_mm_grid_thw(model, found)
    return Qwen2_5_VLForConditionalGeneration.get_mrope_input_positions(model, tokens, features)[0]


@pytest.mark.parametrize("times", ["texts", "seconds"])
@pytest.mark.parametrize("case", ["images", "one frame", "frames", "sampled"])
def test_positions_are_those_of_the_trainer(
    monkeypatch: pytest.MonkeyPatch, times: FrameTimes, case: str
) -> None:
    parts = {
        "images": [image(4, 4), image(2, 6)],
        "one frame": [video(times, 1)],
        "frames": [image(4, 4), video(times, 3), image(2, 6)],
        "sampled": [image(4, 4), image(4, 6)],
    }[case]
    tokens = [TEXT] * 3
    for number, (_, _, text) in enumerate(parts):
        sampled = [IMAGE, IMAGE, TEXT, OPEN, IMAGE] if case == "sampled" and number else []
        tokens += [*sampled, *text, TEXT]
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    wire = [WireImage(kind, str(n), t * h * w // 4, "") for n, (kind, (t, h, w), _) in enumerate(parts)]
    found = find_placeholders(tokens, wire, IDS, opens_frames=times == "texts")
    waiting = {kind: iter(each) for kind, each in found.items()}
    features = []
    for kind, grid, _ in parts:
        data = {f"{kind}_grid_thw": SimpleNamespace(data=torch.tensor(grid))}
        data["second_per_grid_ts"] = SimpleNamespace(data=torch.tensor(1.0))
        place = next(waiting[kind])
        assert place.get_num_embeds() == grid[0] * grid[1] * grid[2] // 4
        features.append(SimpleNamespace(mm_position=place, data=data, modality=kind))
    vision = Vision("k", {}, 1, 8, 8, 1, 8, IMAGE, VIDEO, merge=MERGE, frame_times=times)
    media = [
        Medium(kind, str(n), t * h * w // 4, (t, h, w), dict, 1.0)
        for n, (kind, (t, h, w), _) in enumerate(parts)
    ]
    runs = find_runs(torch.tensor(tokens), media, vision, "s")
    ours = image_positions(len(tokens), runs, media, vision)
    assert torch.equal(vllm_positions(times, tokens, features), ours)
