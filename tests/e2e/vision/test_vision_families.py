"""Engines with tiny models of families with a tower: log-probs of a prompt with images equal those of transformers,
for dense models also after updates of all weights whose live tensors are compared."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from engine_fixtures import publish_checkpoint
from offline_engine import OfflineEngine, offline_engine
from PIL import Image
from transformers import AutoTokenizer
from vision_models import KINDS, log_probs, make_vision_model

from slime.bridges.processors import allow_no_torchvision
from slime.vision.inputs import ImageInputs
from slime.vision.processor import MediaProcessor, load_processor
from vime.vllm.images.engine_input import make_input
from vime.vllm.images.wire import describe
from vime.vllm.versions import processed_pixels

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

MARK = "<|vision_start|><|image_pad|><|vision_end|>"


def engine_log_probs(engine: OfflineEngine, tokens: list[int], images: ImageInputs) -> torch.Tensor:
    """Returns the engine's log-probs of the prompt. vLLM's caches start empty."""
    from vllm import SamplingParams

    inner = engine._llm.llm_engine
    inner.reset_prefix_cache()
    inner.reset_encoder_cache()
    settings = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
    inner.add_request("one", make_input(inner, tokens, describe(images)), settings)
    outputs = []
    while inner.has_unfinished_requests():
        outputs += [output for output in inner.step() if output.finished]
    (output,) = outputs
    pairs = zip(tokens[1:], output.prompt_logprobs[1:], strict=True)
    return torch.tensor([found[token].logprob for token, found in pairs])


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_the_engine_sees_what_transformers_sees(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    allow_no_torchvision()
    models = [make_vision_model(tmp_path / str(seed), kind, seed=seed) for seed in (0, 1)]
    media = MediaProcessor(load_processor(str(tmp_path / "0")), tmp_path / "processed")
    generator = np.random.default_rng(0)
    pictures = [
        Image.fromarray(generator.integers(0, 255, (height, width, 3), dtype=np.uint8))
        for height, width in ((24, 40), (32, 16))
    ]
    text, images = media.expand(f"{MARK}first{MARK}second", pictures)
    tokens = AutoTokenizer.from_pretrained(tmp_path / "0")(text, add_special_tokens=False)["input_ids"]
    expected = [log_probs(model, tokens, images) for model in models]
    assert (expected[0] - expected[1]).abs().max() > 0.1
    settings = {"skip_tokenizer_init": False, "skip_mm_profiling": True, "max_model_len": 512}
    settings |= {"limit_mm_per_prompt": {"image": 2, "video": 0}}
    settings |= {"mm_device_do_normalize": False} if processed_pixels() else {}
    with offline_engine(tmp_path / "0", tmp_path / "weights", monkeypatch, **settings) as engine:
        torch.testing.assert_close(engine_log_probs(engine, tokens, images), expected[0], rtol=0, atol=2e-5)
        if kind == "qwen3_vl_moe":
            return  # a trainer publishes each expert under its number, and this file has stacked experts
        for version, model in ((1, 1), (2, 0)):
            engine.take(
                publish_checkpoint(tmp_path / str(model), tmp_path / "weights", version, checksums=True)
            )
            found = engine_log_probs(engine, tokens, images)
            torch.testing.assert_close(found, expected[model], rtol=0, atol=2e-5)
