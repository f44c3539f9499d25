"""Processes the images of a request to SGLang's /generate in the engine's server, with the processor of its checkpoint.

slime's plug-ins post images there as data URLs. The processed images are stored as those of the run's own requests, so
an image that the run has processed is not processed again.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from vime.vllm.images.engine_input import make_input, media_ids
from vime.vllm.images.wire import describe

if TYPE_CHECKING:
    from vllm.inputs.engine import MultiModalInput, TokensInput
    from vllm.v1.engine.async_llm import AsyncLLM

    from slime.vision.processor import MediaProcessor


async def prepare(
    llm: AsyncLLM, prompt: str | list[int], images: Sequence[str]
) -> tuple[list[int], TokensInput | MultiModalInput]:
    """Returns the ids of a prompt, and vLLM's input for it. An image is the content of its file, in base64 or as a data
    URL.

    The text of a prompt has the model's marker for each image. Ids have the model's id of an image, once per image or
    as often as the processor repeats it. Raises ValueError for an image that cannot be read.
    """
    from vllm.inputs.engine import tokens_input

    if images:
        return await asyncio.to_thread(_prepare, llm, prompt, images)
    ids = llm.get_tokenizer().encode(prompt) if isinstance(prompt, str) else prompt
    return ids, tokens_input(ids)


def _prepare(
    llm: AsyncLLM, prompt: str | list[int], images: Sequence[str]
) -> tuple[list[int], MultiModalInput]:
    from slime.vision.images import open_image

    config = llm.model_config
    media = _find_media(config.model, config.trust_remote_code)
    opened = [open_image(_content(one)) for one in images]
    tokenizer: Any = llm.get_tokenizer()
    if isinstance(prompt, str):
        text, inputs = media.expand(prompt, opened)
        ids: list[int] = tokenizer.encode(text)
    else:
        marker = media.marker("image") or ""
        _, inputs = media.expand(marker * len(opened), opened)
        ids = _expanded(
            prompt, [one.tokens for one in inputs.items], media_ids(config.hf_config).get("image")
        )
    return ids, make_input(llm, ids, describe(inputs))


def _expanded(ids: list[int], counts: Sequence[int], image_id: int | None) -> list[int]:
    """Returns ids in which the id of an image is repeated. Ids that have it as often as all images need are returned
    unchanged."""
    if ids.count(image_id) != len(counts):  # type: ignore[arg-type]
        return ids
    waiting = iter(counts)
    found: list[int] = []
    for one in ids:
        found += [one] * next(waiting) if one == image_id else [one]
    return found


def _content(image: str) -> str:
    """Returns the image as a data URL. The host of an engine reads no files and pages for a request."""
    if image.startswith("data:"):
        return image
    if "://" in image[:16] or len(image) < 64:
        raise ValueError(
            f"image_data must be the content of an image, got {image[:80]!r}; send data:image/png;base64,..."
        )
    return f"data:image/png;base64,{image}"


@functools.lru_cache(1)
def _find_media(checkpoint: str, trust_remote_code: bool) -> MediaProcessor:
    from slime.vision.processor import MediaProcessor, load_processor

    processor = load_processor(checkpoint, trust_remote_code=trust_remote_code)
    if processor is None:
        raise ValueError(
            f"image_data must go to a model with a processor, got {checkpoint}; serve a model with a vision tower"
        )
    return MediaProcessor(processor)
