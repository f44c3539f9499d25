"""Tests that the samples of a group share the encoding of a prompt with images, and continue at the same moment."""

from __future__ import annotations

import asyncio
import threading

import pytest
from vision_cases import draw_image, encode_image

from slime.rollout.stream.prompt_encoder import PromptEncoder
from slime.types import Sample
from slime.vision.images import PromptImage
from slime.vision.inputs import ImageInputs, MediaFile


class Encoding:
    """Records the encoded samples. `go` lets the threads continue."""

    def __init__(self) -> None:
        self.samples: list[Sample] = []
        self.go = threading.Event()

    def __call__(self, sample: Sample) -> list[int]:
        assert self.go.wait(20)
        self.samples.append(sample)
        if sample.prompt == "bad":
            raise ValueError("no image")
        sample.multimodal_train_inputs = ImageInputs((MediaFile("image", "key", "path", 4),))
        return [1, 2, 3]


def make_group(prompt: object, image: PromptImage, count: int = 4) -> list[Sample]:
    """Each sample has its own lists, as in an evaluation."""
    return [Sample(prompt=prompt, multimodal_inputs={"images": [image]}) for _ in range(count)]


def draw() -> PromptImage:
    return PromptImage(encode_image(draw_image()))


def test_a_group_is_encoded_once_and_continues_together() -> None:
    encoding, image = Encoding(), draw()
    group, other = make_group("how many?", image), make_group("how many?", draw(), 1)
    steps: list[str] = []

    async def one(encoder: PromptEncoder, sample: Sample) -> list[int]:
        ids = await encoder.encode(sample)
        if not steps:  # as the engine's client, which sends what waits when all ready tasks have run
            asyncio.get_running_loop().call_soon(steps.append, "sent")
        steps.append("joined")
        return ids

    async def run() -> None:
        encoder = PromptEncoder(encoding)
        tasks = [asyncio.create_task(one(encoder, sample)) for sample in group]
        await asyncio.sleep(0)
        encoding.go.set()
        assert await asyncio.gather(*tasks) == [[1, 2, 3]] * 4
        assert steps == ["joined"] * 4 + ["sent"]
        await encoder.encode(other[0])

    asyncio.run(run())
    assert encoding.samples == [group[0], other[0]], "other images are another prompt"
    inputs = group[0].multimodal_train_inputs
    assert inputs is not None and all(sample.multimodal_train_inputs is inputs for sample in group)


def test_a_cancelled_sample_does_not_stop_its_group_and_an_error_reaches_each_sample() -> None:
    encoding = Encoding()

    async def run() -> None:
        encoder = PromptEncoder(encoding)
        first, second = (asyncio.create_task(encoder.encode(sample)) for sample in make_group("a", image, 2))
        await asyncio.sleep(0)
        first.cancel()
        encoding.go.set()
        assert await second == [1, 2, 3]
        for sample in make_group("bad", image, 2):
            with pytest.raises(ValueError, match="no image"):
                await encoder.encode(sample)

    image = draw()
    asyncio.run(run())
    assert len(encoding.samples) == 3, "an error is not stored"


def test_other_texts_and_tools_are_other_prompts() -> None:
    encoding, image = Encoding(), draw()
    encoding.go.set()
    samples = [
        *make_group(
            [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "a"}]}], image, 2
        ),
        *make_group(
            [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "b"}]}], image, 1
        ),
        *make_group("a", image, 2),
    ]
    samples[-1].metadata = {"tools": [{"name": "look"}]}

    async def run() -> None:
        encoder = PromptEncoder(encoding)
        await asyncio.gather(*(encoder.encode(sample) for sample in samples))

    asyncio.run(run())
    assert len(encoding.samples) == 4
