"""The tokens of a sample that stand for images, and the rotary positions of a sample with images.

Engine and trainer must have the same positions. They are those of vLLM and of transformers' `get_rope_index`. The two
differ for a video of Qwen2.5-VL whose time is longer than its sides. Here, as in vLLM, the next text token follows the
largest position of the video.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from slime.data.media.media import Medium
from slime.models.vision import Vision
from slime.vision.runs import next_run


@dataclass(frozen=True)
class ImageRun:
    """Neighbouring tokens of an image, or of one frame of a video. `start` is the first token in the sample, and
    `first` is the first of these tokens among the tokens of medium number `medium`."""

    medium: int
    start: int
    length: int
    first: int = 0


def find_runs(tokens: Tensor, media: Sequence[Medium], vision: Vision, name: str) -> list[ImageRun]:
    """Returns the runs of a sample's image tokens in the order of the sample.

    `slime.vision.runs` has the rules. Raises ValueError, which names the sample, if an image has no run.
    """
    runs: list[ImageRun] = []
    for kind, token in (("image", vision.image_id), ("video", vision.video_id)):
        of_kind = [number for number, medium in enumerate(media) if medium.kind == kind]
        if not of_kind:
            continue
        indices = torch.nonzero(torch.eq(tokens, -1 if token is None else token))[:, 0].tolist()
        cursor = 0
        for number in of_kind:
            first, start = 0, media[number].start
            for length in _lengths(media[number], vision):
                found = next_run(indices, cursor, length, None if first else start)
                if found is None:
                    where = "" if start is None or first else f" from token {start} on"
                    raise ValueError(
                        f"{name} must have {length} neighbouring tokens {token} for its {kind} {number + 1}{where}, "
                        f"got {len(indices)} such tokens in all; the processor that made the tokens differs from "
                        "the checkpoint's"
                    )
                runs.append(ImageRun(number, indices[found], length, first))
                cursor, first = found + length, first + length
    return sorted(runs, key=lambda run: run.start)


def _lengths(medium: Medium, vision: Vision) -> Iterator[int]:
    """Yields the lengths of the runs of an image or video."""
    if vision.tokens_per_image is not None:  # a processor may cut an image in parts
        yield from [vision.tokens_per_image] * (medium.tokens // vision.tokens_per_image)
    elif medium.kind == "video" and vision.frame_times == "texts":
        frames = medium.grid[0]
        yield from (medium.tokens // frames for _ in range(frames))
    else:
        yield medium.tokens


def image_positions(length: int, runs: Sequence[ImageRun], media: Sequence[Medium], vision: Vision) -> Tensor:
    """Returns the positions [3, length] int64 of a sample's tokens: time, height, width. Text tokens count on from the
    largest position before them."""
    parts: list[Tensor] = []
    done = position = 0
    for run in runs:
        parts.append(_text(run.start - done, position))
        position += run.start - done
        parts.append(_grid(media[run.medium], run, vision) + position)
        position = int(parts[-1].max()) + 1
        done = run.start + run.length
    parts.append(_text(length - done, position))
    return torch.cat(parts, dim=1)


def _text(count: int, first: int) -> Tensor:
    return torch.arange(first, first + count).expand(3, count)


def _grid(medium: Medium, run: ImageRun, vision: Vision) -> Tensor:
    """Returns the positions [3, n] of the tokens of an image, video or frame, from 0."""
    time, height, width = medium.grid
    if medium.kind == "video" and vision.frame_times == "texts":
        time = 1
    spacing = 1.0
    if medium.kind == "video" and vision.frame_times == "seconds":
        spacing = vision.frames_per_second * medium.seconds_per_frame
    axes = torch.meshgrid(
        (torch.arange(time) * spacing).long(),
        torch.arange(height // vision.merge),
        torch.arange(width // vision.merge),
        indexing="ij",
    )
    return torch.stack(axes).reshape(3, -1)
