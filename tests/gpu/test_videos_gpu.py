"""Processes the frames of a video with the model's own processor, which needs torchvision, and compares an engine's
log-probs with those of transformers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from offline_engine import offline_engine
from PIL import Image
from test_vision_families import engine_log_probs
from transformers import AutoTokenizer
from vision_models import log_probs, make_vision_model

from slime.vision.processor import MediaProcessor, load_processor
from vime.vllm.versions import processed_pixels

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl"])
def test_an_engine_sees_a_video(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    model = make_vision_model(tmp_path / "model", kind)
    media = MediaProcessor(load_processor(str(tmp_path / "model")), tmp_path / "processed")
    noise = np.random.default_rng(0).integers(0, 255, (6, 32, 48, 3), dtype=np.uint8)
    text, videos = media.expand(
        f"a<|vision_start|>{media.marker('video')}<|vision_end|>b",
        videos=[[Image.fromarray(frame) for frame in noise]],
    )
    tokens = AutoTokenizer.from_pretrained(tmp_path / "model")(text, add_special_tokens=False)["input_ids"]
    expected = log_probs(model, tokens, videos)
    settings = {"skip_tokenizer_init": False, "skip_mm_profiling": True, "max_model_len": 512}
    settings |= {"dtype": "float32", "limit_mm_per_prompt": {"image": 0, "video": 1}}
    settings |= {"mm_device_do_normalize": False} if processed_pixels() else {}
    with offline_engine(tmp_path / "model", tmp_path / "weights", monkeypatch, **settings) as engine:
        found = engine_log_probs(engine, tokens, videos)
    assert (found - expected).abs().mean() < 1e-2
    torch.testing.assert_close(found, expected, rtol=0, atol=0.05)
