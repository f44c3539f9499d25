"""Tests that processors load without torchvision, in a child process, because the bridge changes transformers."""

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
words = ["<|image_pad|>", "<|video_pad|>", "a"]
tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="a"))
fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, additional_special_tokens=words[:2])
for folder in sys.argv[1:]:
    fast.save_pretrained(folder)
    processor = AutoProcessor.from_pretrained(folder)
    found = processor(text=["<|image_pad|>"], images=[Image.new("RGB", (112, 56))], return_tensors="pt")
    print(type(processor).__name__, found["input_ids"].shape, found["image_grid_thw"].tolist())
    assert processor.video_processor.temporal_patch_size == 2
    try:
        processor(text=["<|video_pad|>"], videos=[[Image.new("RGB", (56, 56))] * 4])
    except ImportError as error:
        print(error)
assert not [name for name in sys.modules if name.startswith("torchvision")]
"""


KINDS = {
    "Qwen2_5_VL": ("qwen2_5_vl", "Qwen2VLVideoProcessor"),
    "Qwen3VL": ("qwen3_vl", "Qwen3VLVideoProcessor"),
}
"""Model type and class of the video processor in a checkpoint, for each processor."""


@pytest.mark.skipif(has_torchvision(), reason="for environments without torchvision")
def test_images_work_and_videos_name_the_missing_package(tmp_path: Path) -> None:
    settings = {"image_processor_type": "Qwen2VLImageProcessor", "patch_size": 14, "merge_size": 2}
    for kind, (model_type, video) in KINDS.items():
        (folder := tmp_path / kind).mkdir()
        (folder / "preprocessor_config.json").write_text(json.dumps(settings))
        (folder / "video_preprocessor_config.json").write_text(json.dumps({"video_processor_type": video}))
        (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    command = [sys.executable, "-c", PROGRAM, *(str(tmp_path / kind) for kind in KINDS)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0::2] == [f"{kind}Processor torch.Size([1, 8]) [[1, 4, 8]]" for kind in KINDS]
    missing = "torchvision must be installed for videos, got a use of preprocess without it"
    assert len(lines) == 4 and all(line.startswith(missing) for line in lines[1::2])
