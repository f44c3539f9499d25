"""Finds the samples of a micro-batch that share a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

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
    """Returns a pair for each sample: the index of the first sample with the same prompt, and the number of tokens that
    the sample takes from it. The number is the length of the prompt, or 0 for the first sample.

    Two prompts are the same if their tokens, their images and their rows in the ragged `columns` are equal. The experts
    that the engine used for a prompt may differ between samples. Such samples do not share.
    """
    ragged = [COLUMNS[name].to_rows for name in columns]
    first: dict[tuple[bytes, ...], int] = {}
    found = []
    for index, i in enumerate(samples):
        tokens = data["tokens"][i]
        length = len(tokens) - data["response_lengths"][i]
        rows = [rows_of(data, [i], token_slice([len(tokens)]))[:length] for rows_of in ragged if rows_of]
        same = tuple(x.numpy().tobytes() for x in (tokens[:length], *rows))
        of = first.setdefault((*same, images[index].prompt_identity(length)), index)
        found.append((of, 0 if of == index else length))
    return found
