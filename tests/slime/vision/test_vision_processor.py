"""Tests of slime.vision.processor: ids and tensors are those of transformers' processors."""

import copy
import pickle
import threading

import pytest
import torch
from vision_cases import PROCESSORS, draw_image, encode_image, write_processor

from slime.vision.images import PromptImage
from slime.vision.processor import MediaProcessor, load_processor

IMAGES = [draw_image((56, 84)), draw_image((300, 200), "blue"), draw_image((40, 40), "green")]


@pytest.fixture(scope="module", params=PROCESSORS)
def media(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    return MediaProcessor(load_processor(write_processor(folder, request.param)), folder / "store")


@pytest.fixture(scope="module")
def images():
    return [PromptImage(encode_image(image)) for image in IMAGES]


def prompt(media, images):
    parts = [{"type": "text", "text": "Which is larger? "}, *({"type": "image"} for _ in images)]
    messages = [{"role": "user", "content": parts}]
    return media.processor.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)


def test_ids_and_tensors_are_those_of_transformers(media, images):
    text = prompt(media, images)
    expanded, inputs = media.expand(text, images)
    ids = media.processor.tokenizer.encode(expanded, add_special_tokens=False)
    theirs = media.processor(text=[text], images=IMAGES, return_tensors="pt")
    assert ids == theirs["input_ids"][0].tolist()
    assert all(image._im is None for image in images), "the pixels are freed after the image was processed"
    tensors = inputs.tensors()
    for name in ("pixel_values", "image_grid_thw"):
        if name in theirs:
            assert torch.equal(tensors[name], theirs[name])
    counted = torch.isin(theirs["input_ids"], torch.tensor(media.processor.image_token_ids)).sum()
    assert sum(item.tokens for item in inputs.items) == counted > 0
    if "image_grid_thw" in theirs:
        assert inputs.grids == tuple(map(tuple, theirs["image_grid_thw"].tolist()))


def test_sizes_alone_give_the_number_of_tokens(media, images):
    text = prompt(media, images)
    expanded, _ = media.expand(text, images)
    encode = media.processor.tokenizer.encode
    plain = len(encode(text, add_special_tokens=False)) - len(images)
    assert plain + sum(map(media.count_tokens, images)) == len(encode(expanded, add_special_tokens=False))


def test_an_image_is_processed_once_in_all_forms_and_threads(media, monkeypatch):
    calls = []
    whole = type(media)._process

    def counted(self, *args):
        calls.append(args)
        return whole(self, *args)

    monkeypatch.setattr(type(media), "_process", counted)
    content = encode_image(draw_image((70, 60), "yellow"))
    found = []
    threads = [
        threading.Thread(target=lambda: found.append(media.process("image", PromptImage(content))))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == 1 and len(set(found)) == 1
    again = MediaProcessor(media.processor, media._folder)
    assert again.process("image", content) == found[0] and len(calls) == 1
    assert pickle.loads(pickle.dumps(found[0].item)) == found[0].item


@pytest.mark.parametrize(("markers", "got"), [(2, "1 fewer"), (4, "more")])
def test_a_prompt_without_a_marker_per_image_is_an_error(media, images, markers, got):
    text = prompt(media, images[:1] * markers)
    with pytest.raises(
        ValueError, match=f"a rendered prompt must have one .* per image, got {got} than its images"
    ):
        media.expand(text, images)
    assert media.expand(text)[0] == text  # a text without images


def test_another_setting_gives_another_key(media):
    other = copy.deepcopy(media.processor)
    other.image_processor.image_mean = [0.1, 0.2, 0.3]
    assert MediaProcessor(other, media._folder).identity != media.identity


def test_a_checkpoint_without_a_processor_has_none(tmp_path):
    assert load_processor(str(tmp_path)) is None


def test_a_shape_that_the_processor_refuses_is_named(tmp_path):
    media = MediaProcessor(load_processor(write_processor(tmp_path / "model")), tmp_path)
    narrow = PromptImage(encode_image(draw_image((4200, 20))))
    with pytest.raises(
        ValueError, match=r"an image must have a size .* got 4200 x 20 pixels \(absolute aspect"
    ):
        media.count_tokens(narrow)
    with pytest.raises(ValueError, match="an image must be one that the model's processor accepts"):
        media.process("image", narrow)
