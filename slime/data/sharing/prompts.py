"""Finds the first tokens that samples of a micro-batch share: prompts, and the turns before a session's fork."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from slime.data.columns import COLUMNS
from slime.data.media.packing import SampleImages
from slime.data.token_slice import token_slice
from slime.models import read_decoder
from slime.models.decoder import Hf
from slime.models.vision import Vision
from slime.types import TrainData

if TYPE_CHECKING:
    from slime.config.schema import Config


def shares_prompts(config: Config, hf_config: Hf) -> bool:
    """Returns true if the model computes a prompt once for all samples of a micro-batch with this prompt. Layers with a
    state prevent sharing, because their state after the prompt is not stored."""
    if read_decoder(hf_config).stateful:
        return False
    engine = config.megatron.overrides.get("transformer_impl") == "transformer_engine"
    return config.data.share_prompts and config.megatron.context_parallel_size == 1 and not engine


def sample_images(data: TrainData, samples: list[int], vision: Vision | None) -> list[SampleImages]:
    """Returns the images of the samples, for a model with the tower `vision`. Raises ValueError, which names the
    sample, if its tokens and its images do not fit each other."""
    inputs = data.get("multimodal_train_inputs") or [None] * len(data["tokens"])
    indices = data.get("sample_indices")
    return [
        SampleImages.find(
            *(data["tokens"][i], len(data["tokens"][i]) - data["response_lengths"][i], inputs[i], vision),
            f"sample {i if indices is None else indices[i]}",
        )
        for i in samples
    ]


def shared_prompts(
    data: TrainData, samples: list[int], columns: Sequence[str], images: Sequence[SampleImages]
) -> list[tuple[int, int]]:
    """Returns a pair for each sample: the index of an earlier sample, and the number of first tokens that the sample
    takes from it. The pair is (own index, 0) for a sample that takes no tokens.

    Two samples share the tokens with which both begin, if these tokens contain a sample's whole prompt. So samples of a
    group share their prompt, and the branches of a session share all turns before their fork. Tokens are common if they
    are equal, and their images and their rows in the ragged `columns` too. The experts that the engine used for a token
    may differ between samples. Such samples do not share the token.
    """
    prompts = [len(data["tokens"][i]) - data["response_lengths"][i] for i in samples]
    numbers = {key: number for number, key in enumerate({m.key for one in images for m in one.media}, 1)}
    identities = [_identities(data, i, columns, one, numbers) for i, one in zip(samples, images, strict=True)]
    known: list[tuple[bytes, int]] = []  # sorted, so that a neighbour has the longest common beginning
    found: list[tuple[int, int]] = []
    for index, identity in enumerate(identities):
        key = (identity.tobytes(), index)
        at = bisect(known, key)
        of, taken = index, 0
        for _, other in known[max(at - 1, 0) : at + 1]:
            common = _count_common(identity, identities[other])
            if common > taken and common >= min(prompts[index], prompts[other]):
                of, taken = other, common
        while taken and taken <= found[of][1]:
            of = found[of][0]  # the sample that computes the tokens
        known.insert(at, key)
        found.append((of, taken))
    return found


def _identities(
    data: TrainData, i: int, columns: Sequence[str], images: SampleImages, numbers: dict[str, int]
) -> npt.NDArray[np.uint8]:
    """Returns [L, bytes]: rows that are equal for equal tokens with equal images and rows. `numbers` maps the images of
    all samples to numbers above 0."""
    tokens = data["tokens"][i]
    parts = [tokens.numpy()[:, None]]
    if numbers:
        image = np.zeros((len(tokens), 1), dtype=np.int64)
        for run in images.runs:
            image[run.start : run.start + run.length] = numbers[images.media[run.medium].key]
        parts.append(image)
    if ragged := [rows_of for name in columns if (rows_of := COLUMNS[name].to_rows) is not None]:
        row = token_slice([len(tokens)])
        parts += [rows_of(data, [i], row).flatten(1).numpy() for rows_of in ragged]
    return np.concatenate([np.ascontiguousarray(part).view(np.uint8) for part in parts], axis=1)


def _count_common(one: npt.NDArray[np.uint8], other: npt.NDArray[np.uint8]) -> int:
    """Returns the number of first rows that are equal."""
    shorter = min(len(one), len(other))
    (different,) = np.nonzero((one[:shorter] != other[:shorter]).any(axis=1))
    return int(different[0]) if len(different) else shorter
