"""The images of a packed micro-batch: the tower's inputs, and the rows whose embeddings the tower's output replaces.

An image that several samples of the micro-batch have goes through the tower once. Shapes: the micro-batch has T packed
tokens, the model computes P rows, k of them are image tokens, and the tower has F output rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from slime.data.media.media import Medium, list_media
from slime.data.media.positions import ImageRun, find_runs, image_positions
from slime.data.media.tower_cache import TowerCache
from slime.models.vision import Vision
from slime.system.uploads import upload
from slime.vision.inputs import TrainInputs


@dataclass(frozen=True)
class PackedImages:
    """The images of this rank's rows of a micro-batch."""

    media: Sequence[Medium]
    """The distinct images, in the order of the tower's rows. Empty on ranks without image rows or without tower."""
    rows: Tensor
    """[k] int64: the rows of image tokens."""
    features: Tensor
    """[k] int64: the tower's output row for each of `rows`."""
    positions: Tensor | None
    """[3, P] int64: the rotary positions of this rank's rows. None for a decoder whose positions have one axis."""
    cache: TowerCache | None = None
    """The outputs of frozen towers. None: a frozen tower computes each micro-batch."""
    whole: tuple[tuple[int, int], ...] = ()
    """Per image, its rows [start, stop), if its tokens see the whole image (`Vision.sees_whole_image`)."""

    def to(self, device: torch.device | str) -> PackedImages:
        return PackedImages(
            self.media,
            upload(self.rows, device),
            upload(self.features, device),
            None if self.positions is None else upload(self.positions, device),
            self.cache,
            self.whole,
        )


@dataclass(frozen=True)
class SampleImages:
    """The images of one sample, and its tokens for them."""

    media: Sequence[Medium]
    runs: Sequence[ImageRun]
    tokens: Tensor

    @classmethod
    def find(
        cls, tokens: Tensor, prompt: int, inputs: TrainInputs | None, vision: Vision | None, name: str
    ) -> SampleImages:
        """Returns the images of a sample whose first `prompt` tokens are its prompt. Raises ValueError, which names the
        sample, if tokens and images do not fit each other."""
        if vision is None:
            if inputs is not None:
                raise ValueError(
                    f"multimodal_train_inputs of {name} must be None for a text model, got {type(inputs).__name__}; "
                    "use a model with a vision tower"
                )
            return cls((), (), tokens)
        media = list_media(inputs, vision)
        runs = find_runs(tokens, media, vision, name)
        ids = [token for token in (vision.image_id, vision.video_id) if token is not None]
        wanted = int(torch.isin(tokens[:prompt], torch.tensor(ids)).sum())
        got = sum(run.length for run in runs if run.start < prompt)
        if wanted != got:
            raise ValueError(
                f"the prompt of {name} must have an image for each of its {wanted} image tokens, got images for "
                f"{got}; give the images of the prompt in the order of their tokens"
            )
        return cls(media, runs, tokens)


def pack_images(
    samples: Sequence[SampleImages],
    vision: Vision | None,
    taken: Tensor,
    rows: int,
    *,
    has_tower: bool = True,
    cache: TowerCache | None = None,
) -> PackedImages | None:
    """Returns the images of a rank that computes the packed tokens `taken` [n] and `rows` rows. Returns None if no
    sample has an image. Pixels are read when the tower runs."""
    if vision is None or not any(sample.runs for sample in samples):
        return None
    total = sum(len(sample.tokens) for sample in samples)
    numbers: dict[str, int] = {}
    media: list[Medium] = []
    medium_of = torch.full((total,), -1)
    index_in = torch.zeros(total, dtype=torch.int64)
    first = 0
    for sample in samples:
        for run in sample.runs:
            medium = sample.media[run.medium]
            number = numbers.setdefault(medium.key, len(media))
            if number == len(media):
                media.append(medium)
            here = slice(first + run.start, first + run.start + run.length)
            medium_of[here] = number
            index_in[here] = torch.arange(run.first, run.first + run.length)
        first += len(sample.tokens)
    mine = medium_of[taken]
    image_rows = torch.nonzero(mine >= 0)[:, 0]
    used = sorted(set(mine[image_rows].tolist()), key=lambda number: (media[number].kind != "image", number))
    starts = torch.zeros(len(media), dtype=torch.int64)
    start = 0
    for number in used:
        starts[number] = start
        start += media[number].tokens
    return PackedImages(
        [media[number] for number in used] if has_tower else [],
        image_rows,
        starts[mine[image_rows]] + index_in[taken][image_rows],
        _positions(samples, vision, taken, rows) if vision.axes else None,
        cache,
        _whole_runs(samples, taken) if vision.sees_whole_image else (),
    )


def _whole_runs(samples: Sequence[SampleImages], taken: Tensor) -> tuple[tuple[int, int], ...]:
    """Returns, per run of image tokens, its rows [start, stop) among the tokens `taken`."""
    numbers = torch.full((sum(len(sample.tokens) for sample in samples),), -1)
    first = count = 0
    for sample in samples:
        for run in sample.runs:
            numbers[first + run.start : first + run.start + run.length] = count
            count += 1
        first += len(sample.tokens)
    found, lengths = numbers[taken].unique_consecutive(return_counts=True)
    stops = lengths.cumsum(0)
    own = found >= 0
    return tuple(zip((stops - lengths)[own].tolist(), stops[own].tolist(), strict=True))


def _positions(samples: Sequence[SampleImages], vision: Vision, taken: Tensor, rows: int) -> Tensor:
    whole = torch.cat(
        [image_positions(len(sample.tokens), sample.runs, sample.media, vision) for sample in samples], dim=1
    )
    positions = torch.zeros(3, rows, dtype=torch.int64)
    positions[:, : len(taken)] = whole[:, taken]
    return positions
