"""Tests the functions for images that slime's plug-ins call, as its multi-turn example with images calls them."""

import logging

import numpy as np
import pytest
import torch
from rollout_double import write_lines
from vision_cases import draw_image, encode_image, write_processor

from slime.data.data_source import Dataset
from slime.data.tokenizer import load_tokenizer
from slime.utils.processing_utils import (
    build_processor_kwargs,
    encode_image_for_rollout_engine,
    load_processor,
    process_vision_info,
)
from slime.vision.images import open_image

RED = draw_image((56, 56))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_processor(tmp_path_factory.mktemp("model"))


def test_messages_with_images_become_arguments_of_the_processor(model):
    processor = load_processor(model, trust_remote_code=True)
    parts = [
        {"type": "text", "text": "Look: "},
        {"type": "image", "image": RED},
        {"type": "image", "image": encode_image_for_rollout_engine(draw_image((28, 28), "blue"))},
    ]
    messages = [{"role": "system", "content": "Be short."}, {"role": "user", "content": parts}]
    found = process_vision_info(messages, processor)
    assert [np.asarray(image)[14, 14].tolist() for image in found["images"]] == [[255, 0, 0], [0, 0, 255]]
    assert found["videos"] is None
    text = load_tokenizer(model).apply_chat_template(messages, tokenize=False)
    out = processor(text=text, **build_processor_kwargs(found))
    assert isinstance(out["input_ids"][0], list)
    assert out["input_ids"][0].count(processor.image_token_id) == 4 + 1
    train_inputs = {name: value for name, value in out.items() if name not in ["input_ids", "attention_mask"]}
    assert set(train_inputs) == {"pixel_values", "image_grid_thw"}
    assert isinstance(train_inputs["pixel_values"], torch.Tensor)
    assert build_processor_kwargs(None)["text_kwargs"]["return_tensors"] is None


def test_an_image_for_an_engine_is_a_png_with_the_same_pixels():
    url = encode_image_for_rollout_engine(RED.convert("P"))
    assert np.array_equal(np.asarray(open_image(url)), np.asarray(RED.convert("P").convert("RGB")))


def test_a_model_of_text_has_no_processor(tmp_path, caplog):
    assert load_processor(str(tmp_path)) is None and not caplog.records
    (tmp_path / "preprocessor_config.json").write_text("{}")
    with caplog.at_level(logging.WARNING):
        assert load_processor(str(tmp_path)) is None
    assert "--hf-checkpoint must hold a processor" in caplog.text


def test_a_data_set_counts_the_tokens_of_images(tmp_path, model, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    for name, size in {"small": (56, 56), "large": (56, 84)}.items():
        (tmp_path / f"{name}.png").write_bytes(encode_image(draw_image(size)))
    rows = [{"q": "<image>a", "images": [f"{name}.png"]} for name in ("small", "large")]
    path = write_lines(tmp_path / "rows.jsonl", rows)
    tokenizer, processor = load_tokenizer(model), load_processor(model)
    options = {"prompt_key": "q", "multimodal_keys": {"image": "images"}, "apply_chat_template": True}
    whole = Dataset(path, tokenizer, processor, None, **options)
    lengths = [
        len(processor(text=sample.prompt, **build_processor_kwargs(sample.multimodal_inputs))["input_ids"][0])
        for sample in whole.samples
    ]
    assert lengths[1] == lengths[0] + 2
    kept = Dataset(path, tokenizer, processor, lengths[0], **options)
    assert [sample.multimodal_inputs["images"][0].size for sample in kept.samples] == [(56, 56)]
