"""Tests that a processor loads without torchvision, in a child process, because the bridge changes transformers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from slime.bridges.processors import has_torchvision

PROGRAM = """
import sys
from slime.bridges import processors
for _ in range(2): processors.allow_no_torchvision()
from PIL import Image
from tokenizers import Tokenizer, models
from transformers import AutoProcessor, PreTrainedTokenizerFast
folder, words = sys.argv[1], ["<|image_pad|>", "<|video_pad|>", "a"]
tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="a"))
fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, additional_special_tokens=words[:2])
fast.save_pretrained(folder)
processor = AutoProcessor.from_pretrained(folder)
found = processor(text=["<|image_pad|>"], images=[Image.new("RGB", (112, 56))], return_tensors="pt")
print(type(processor).__name__, found["input_ids"].shape, found["image_grid_thw"].tolist())
assert processor.video_processor.temporal_patch_size == 2
assert not [name for name in sys.modules if name.startswith("torchvision")]
try:
    processor(text=["<|video_pad|>"], videos=[[Image.new("RGB", (56, 56))] * 4])
except ImportError as error:
    print(error)
"""


@pytest.mark.skipif(has_torchvision(), reason="for environments without torchvision")
@pytest.mark.parametrize("kind", ["Qwen2_5_VL", "Qwen3VL"])
def test_images_work_and_videos_name_the_missing_package(tmp_path: Path, kind: str) -> None:
    settings = {"image_processor_type": "Qwen2VLImageProcessor", "patch_size": 14, "merge_size": 2}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings))
    video = {
        "video_processor_type": "Qwen2VLVideoProcessor" if kind == "Qwen2_5_VL" else f"{kind}VideoProcessor"
    }
    (tmp_path / "video_preprocessor_config.json").write_text(json.dumps(video))
    model_type = {"Qwen2_5_VL": "qwen2_5_vl", "Qwen3VL": "qwen3_vl"}[kind]
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    first, last = done.stdout.splitlines()
    assert first == f"{kind}Processor torch.Size([1, 8]) [[1, 4, 8]]"
    assert last.startswith("torchvision must be installed for videos, got a use of preprocess without it")
