"""Encodes prompts with images in threads, once for the samples of a group.

The samples of a group that wait for the same prompt continue at the same moment. Then the engine's client sends them in
one request, and the engine reads the images of a group once.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable

from slime.types import Sample
from slime.vision.inputs import TrainInputs
from slime.vision.processor import list_media

Encoded = tuple[list[int], TrainInputs | None]
"""Ids of a prompt, and its images."""


class PromptEncoder:
    """Calls `encode`, which returns the ids of a sample's prompt and sets its `multimodal_train_inputs`."""

    def __init__(self, encode: Callable[[Sample], list[int]]) -> None:
        self._encode = encode
        self._running: dict[str, asyncio.Task[Encoded]] = {}

    async def encode(self, sample: Sample) -> list[int]:
        """Returns the ids of the sample's prompt, and sets `multimodal_train_inputs`, which the samples share."""
        key = _identify(sample)
        if key not in self._running:
            self._running[key] = asyncio.create_task(asyncio.to_thread(self._encode_one, sample))
            self._running[key].add_done_callback(lambda _: self._running.pop(key))
        # A sample that is cancelled does not stop the encoding for the others.
        ids, sample.multimodal_train_inputs = await asyncio.shield(self._running[key])
        return list(ids)

    def _encode_one(self, sample: Sample) -> Encoded:
        return self._encode(sample), sample.multimodal_train_inputs


def _identify(sample: Sample) -> str:
    """Returns a text that is equal for samples with equal prompts and the same images. An image is identified by its
    object, which lives as long as the sample that is encoded."""
    inputs = sample.multimodal_inputs or {}
    media = [[id(value) for value in list_media(inputs, kind)] for kind in ("images", "videos")]
    parts = [
        sample.prompt,
        sample.apply_chat_template_kwargs,
        sample.metadata.get("tools"),
        media,
    ]
    return json.dumps(parts, default=id)
