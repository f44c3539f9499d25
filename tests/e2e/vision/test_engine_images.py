"""A real vLLM server with a tiny Qwen2.5-VL takes processed images: its log-probs are those of transformers for equal
pixels, before and after an update of all weights."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from engine_fixtures import Stack
from PIL import Image
from transformers import AutoTokenizer
from turns_cases import *  # noqa: F403
from vision_models import IDS, log_probs, make_vision_model

from slime.protocols import GenerateResult, ScoreResult
from slime.vision.images import encode_png
from slime.vision.inputs import ImageInputs
from slime.vision.processor import MediaProcessor, load_processor
from vime.pool.control import ControlError, request
from vime.pool.router import RouterSpec
from vime.vllm import client
from vime.vllm.images.wire import WireImage, describe, with_content
from vime.vllm.pool import VllmEnginePool
from vime.vllm.server import VllmSpec

pytestmark = pytest.mark.e2e

MARK = "<|vision_start|><|image_pad|><|vision_end|>"


class VisionStack(Stack):
    """A pool with one engine of a tiny model with a tower, and two sets of weights for it."""

    def __init__(self, root: Path) -> None:
        self.weight_dir, self.root = root / "weights", root
        self.models = [
            make_vision_model(root / name, seed=seed) for seed, name in enumerate(("first", "second"))
        ]
        self.checkpoint, self.other = root / "first", root / "second"
        self.media = MediaProcessor(load_processor(str(self.checkpoint)), root / "processed")
        self.tokenizer = AutoTokenizer.from_pretrained(self.checkpoint)
        spec = VllmSpec(
            model_path=str(self.checkpoint),
            run_key=self.key,
            log_path=str(root / "engine.log"),
            weight_dir=str(self.weight_dir),
            start_timeout_s=240,
            vllm_argv=("--limit-mm-per-prompt", '{"image": 3, "video": 0}'),
        )
        router = RouterSpec(run_key=self.key, log_path=str(root / "router.log"))
        self.pool = VllmEnginePool([spec], router, source=self, health_check_interval_s=5)
        self.parts, self.version = [], -1

    def prompt(self, text: str, *images: Image.Image) -> tuple[list[int], ImageInputs]:
        expanded, inputs = self.media.expand(text, images=images)
        return self.tokenizer(expanded, add_special_tokens=False)["input_ids"], inputs

    def sample(
        self, tokens: list[int], images: ImageInputs | None, count: int = 1, **params: object
    ) -> list[GenerateResult]:
        async def run() -> list[GenerateResult]:
            engine = self.pool.client()
            assert engine is not None
            sampling = {
                "temperature": 1.0,
                "max_new_tokens": 6,
                "stop_token_ids": [],
                "ignore_eos": True,
                **params,
            }
            more = {} if images is None else {"images": images}
            tasks = [engine.generate(tokens, sampling, seed=i, deadline_s=60, **more) for i in range(count)]
            try:
                return await asyncio.gather(*tasks)
            finally:
                await engine.close()

        return asyncio.run(run())

    def score(self, tokens: list[int], images: ImageInputs) -> ScoreResult:
        async def run() -> ScoreResult:
            engine = self.pool.client()
            assert engine is not None
            try:
                return await engine.score(tokens, start=1, top_k=1, deadline_s=60, images=images)
            finally:
                await engine.close()

        return asyncio.run(run())

    def check(self, tokens: list[int], images: ImageInputs | None, model: int, count: int = 1) -> list[int]:
        """Samples, and compares the log-probs with transformers'. Returns the first response."""
        results = self.sample(tokens, images, count)
        for result in results:
            expected = log_probs(self.models[model], tokens + result.token_ids, images)[len(tokens) - 1 :]
            torch.testing.assert_close(torch.tensor(result.log_probs), expected, rtol=0, atol=2e-5)
        return results[0].token_ids


def draw(seed: int, width: int, height: int) -> Image.Image:
    """Draws noise: each pixel matters."""
    return Image.fromarray(np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8))


VisionStack.draw = staticmethod(draw)


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VisionStack]:
    stack = VisionStack(tmp_path_factory.mktemp("vision"))
    stack.pool.start()
    yield stack
    stack.pool.stop()


def test_log_probs_are_those_of_transformers(stack: VisionStack) -> None:
    tokens, images = stack.prompt(f"{MARK}which{MARK}?", draw(0, 40, 24), draw(1, 16, 32))
    text, _ = stack.prompt("no image here")
    stack.check(tokens, images, 0, count=3)
    stack.check(text, None, 0)
    scores = torch.from_numpy(stack.score(tokens, images).log_probs.copy())
    torch.testing.assert_close(scores, log_probs(stack.models[0], tokens, images), rtol=0, atol=2e-5)


def test_a_later_turn_adds_an_image(stack: VisionStack) -> None:
    tokens, images = stack.prompt(f"{MARK}a", draw(2, 32, 32))
    response = [token for token in stack.check(tokens, images, 0) if token not in IDS.values()]
    more, added = stack.prompt(f"tool:{MARK}b", draw(3, 24, 16))
    stack.check(tokens + response + more, images + added, 0)


def replace_path(image: WireImage, path: Path) -> WireImage:
    return msgspec.structs.replace(image, path=str(path))


def test_an_engine_without_the_files_gets_their_content(
    stack: VisionStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens, images = stack.prompt(f"{MARK}a", draw(4, 32, 32))
    expected = stack.sample(tokens, images)[0]
    hidden = tmp_path / "on-another-host"
    monkeypatch.setattr(client, "describe", lambda _: [replace_path(one, hidden) for one in describe(images)])
    monkeypatch.setattr(client, "with_content", lambda _: with_content(describe(images)))
    again = stack.sample(tokens, images)[0]
    assert again.token_ids == expected.token_ids and again.log_probs == expected.log_probs


@pytest.mark.parametrize("case", ["fewer ids", "other count", "too many", "no tensors"])
def test_an_image_that_does_not_fit_is_an_error_of_its_request(
    stack: VisionStack, case: str, tmp_path: Path
) -> None:
    tokens, images = stack.prompt(f"{MARK}a", draw(5, 32, 32))
    (item,) = images.items
    if case == "fewer ids":
        tokens.remove(IDS["<|image_pad|>"])
        match = "image 0 of 1 must have 16 neighbouring ids 261 in the prompt, got 15"
    elif case == "other count":
        images = ImageInputs((replace(item, tokens=15),))
        match = "image 0 must have 16 ids in the prompt, which is what the engine's tower returns, got 15"
    elif case == "too many":
        tokens, images = stack.prompt(MARK * 4, *(draw(i, 16, 16) for i in range(4)))
        match = "At most 3 image"
    else:
        (tmp_path / "x").write_bytes(b"no tensors")
        images = ImageInputs((replace(item, path=str(tmp_path / "x")),))
        match = "a processed image must be a file of safetensors"
    with pytest.raises(ValueError, match=match):
        stack.sample(tokens, images)
    text, _ = stack.prompt("still alive")
    stack.check(text, None, 0)


def test_the_gateway_takes_image_data_of_plug_ins(stack: VisionStack) -> None:
    picture = draw(6, 32, 24)
    tokens, images = stack.prompt(f"{MARK}a", picture)
    facts, pad = stack.pool.facts, IDS["<|image_pad|>"]
    address = f"http://{facts['sglang_router_ip']}:{facts['sglang_router_port']}"
    short = [token for i, token in enumerate(tokens) if token != pad or tokens[i - 1] != pad]
    url = f"data:image/png;base64,{base64.b64encode(encode_png(picture)).decode()}"
    sampling = {"max_new_tokens": 4, "seed": 3, "ignore_eos": True}
    answers = []
    for prompt in ({"text": f"{MARK}a"}, {"input_ids": tokens}, {"input_ids": short}):
        body = {**prompt, "image_data": [url], "sampling_params": sampling, "return_logprob": True}
        _, answer = request(address, stack.key, "POST", "/generate", body, timeout_s=60)
        answers.append(json.loads(answer))
    assert answers[0]["output_ids"] == answers[1]["output_ids"] == answers[2]["output_ids"]
    found = [row[0] for row in answers[0]["meta_info"]["output_token_logprobs"]]
    expected = log_probs(stack.models[0], tokens + answers[0]["output_ids"], images)[len(tokens) - 1 :]
    torch.testing.assert_close(torch.tensor(found), expected, rtol=0, atol=2e-5)
    bad = {"text": f"{MARK}a", "image_data": ["/etc/passwd"]}
    with pytest.raises(ControlError, match="image_data must be the content of an image"):
        request(address, stack.key, "POST", "/generate", bad, timeout_s=60)


def test_an_update_of_the_tower_empties_the_cache_of_its_outputs(stack: VisionStack) -> None:
    tokens, images = stack.prompt(f"{MARK}which{MARK}?", draw(0, 40, 24), draw(1, 16, 32))
    stack.check(tokens, images, 0)
    for model, checkpoint in ((1, stack.other), (0, stack.checkpoint)):
        stack.push(checkpoint, checksums=True)
        stack.check(tokens, images, model)
