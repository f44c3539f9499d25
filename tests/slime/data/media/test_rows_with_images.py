"""Tests rows with images: their messages, their prompts, the ids of their samples, and rows that are wrong."""

import asyncio
import base64
import copy
import json
import shutil

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from rollout_double import make_args, write_lines
from vision_cases import draw_image, encode_image, write_processor

from slime.config import Config
from slime.config.sections.engine import EngineFacts
from slime.data.columns import COLUMNS
from slime.data.media.check import check_for
from slime.data.media.references import lacks_references
from slime.data.media.row import without_media
from slime.data.prompts import load_prompts
from slime.data.rows import RowColumns
from slime.data.source import PromptDataSource
from slime.data.tokenizer import load_tokenizer
from slime.rollout.state import GenerateState
from slime.types import Sample

RED, BLUE = (encode_image(draw_image((56, 56), color)) for color in ("red", "blue"))
KEYS = {"image": "images"}
COLUMNS_OF_ROWS = RowColumns(input_key="prompt", label_key="label", multimodal_keys=KEYS)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_processor(tmp_path_factory.mktemp("model"))


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "pictures").mkdir()
    for name, content in {"red": RED, "blue": BLUE}.items():
        (tmp_path / "pictures" / f"{name}.png").write_bytes(content)
    return tmp_path


def colors(images):
    return [np.asarray(image)[28, 28].tolist() for image in images]


def one_prompt(folder, row, **columns):
    columns = {"input_key": "prompt", "multimodal_keys": KEYS, **columns}
    path = write_lines(folder / "rows.jsonl", [{"label": "1", **row}])
    return load_prompts(path, RowColumns(**columns))[0]


def test_markers_take_the_images_of_the_column_in_order(folder):
    row = {
        "prompt": [{"role": "user", "content": "<image>a<image>b"}],
        "images": ["pictures/red.png", "pictures/blue.png"],
    }
    found = one_prompt(folder, row)
    assert without_media(found.text)[0]["content"] == [
        {"type": "image"}, {"type": "text", "text": "a"}, {"type": "image"}, {"type": "text", "text": "b"},
    ]  # fmt: skip
    assert colors(found.images) == [[255, 0, 0], [0, 0, 255]]
    assert [part["image"] for part in found.text[0]["content"] if part["type"] == "image"] == list(
        found.images
    )
    assert found.multimodal_inputs() == {"images": list(found.images), "videos": None}


def test_parts_name_their_own_image_or_take_the_next_of_the_column(folder):
    url = f"data:image/png;base64,{base64.b64encode(BLUE).decode()}"
    parts = [
        {"type": "image"},
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "image", "image": str(folder / "pictures" / "red.png")},
        {"type": "text", "text": "<image> is text here"},
    ]
    row = {"prompt": [{"role": "user", "content": parts}], "images": "pictures/blue.png"}
    found = one_prompt(folder, row)
    assert colors(found.images) == [[0, 0, 255], [0, 0, 255], [255, 0, 0]]
    assert found.text[0]["content"][3] == parts[3]


@pytest.mark.parametrize("form", ["bytes", "struct", "list", "json", "path"])
def test_parquet_and_json_columns_give_the_same_images(folder, form):
    cells = {
        "bytes": [RED],
        "struct": [{"bytes": RED, "path": None}],
        "list": [[{"bytes": RED, "path": "a.png"}]],
        "path": [[str(folder / "pictures" / "red.png")]],
        "json": [json.dumps([str(folder / "pictures" / "red.png")])],
    }[form]
    table = pa.table({"prompt": ["<image> what?"], "label": ["1"], "images": cells})
    if form == "list":  # as `datasets` writes a column of images
        feature = {"info": {"features": {"images": {"feature": {"_type": "Image"}, "_type": "List"}}}}
        table = table.replace_schema_metadata({"huggingface": json.dumps(feature)})
    path = folder / f"{form}.parquet"
    pq.write_table(table, path)
    (found,) = load_prompts(str(path), COLUMNS_OF_ROWS)
    assert colors(found.images) == [[255, 0, 0]]
    content = [{"type": "image"}, {"type": "text", "text": " what?"}]
    assert without_media(found.text) == [{"role": "user", "content": content}] and found.metadata == {}


@pytest.mark.parametrize(
    ("row", "text"),
    [
        ({"images": []}, "rows.jsonl:1: the prompt must have one <image> per image, got more than 0 for 0 images of"),
        ({}, "got more than 0 for 0 images of column 'images'; write <image> where each image belongs"),
        ({"images": ["pictures/red.png"] * 2}, "got 1 for 2 images of column 'images'"),
        ({"images": ["gone.png"]}, "rows.jsonl:1: image 1 of column 'images': an image must be a file .*gone.png"),
        ({"images": ["rows.jsonl"]}, r"image 1 of column 'images': an image must be in a format that Pillow reads"),
        ({"images": [3]}, "image 1 of column 'images': an image must be a path, .*, got int"),
        ({"prompt": [{"role": "user", "content": "<image><video>"}], "images": ["pictures/red.png"]}, None),
        (
            {"prompt": [{"role": "user", "content": [{"type": "video"}]}]},
            "one <video> per video, got more than 0 for 0 videos without a key in --multimodal-keys",
        ),
        (
            {"prompt": [{"role": "user", "content": [{"type": "audio", "audio": "a"}]}]},
            'must be {"type": "text", "text": ...}, got .*audio.*; give --multimodal-keys for images',
        ),
    ],
)  # fmt: skip
def test_a_row_whose_images_are_wrong_is_an_error_with_file_and_line(folder, row, text):
    row = {"prompt": [{"role": "user", "content": "<image>?"}], **row}
    if text is None:  # <video> is text without its key
        assert one_prompt(folder, row).text[0]["content"][-1] == {"type": "text", "text": "<video>"}
        return
    with pytest.raises(ValueError, match=text):
        one_prompt(folder, row)


def test_a_file_that_is_gone_at_the_next_start_is_an_error_before_it(folder):
    """The checks of a file are in the cache, but its images are other files."""
    rows = [{"prompt": "a", "label": "1", "images": ["pictures/red.png"]} for _ in range(400)]
    (folder / "pictures" / "last.png").write_bytes(BLUE)
    rows[-1]["images"] = ["pictures/last.png"]
    path = write_lines(folder / "rows.jsonl", rows)
    assert len(load_prompts(path, COLUMNS_OF_ROWS)) == 400
    (folder / "pictures" / "last.png").unlink()
    text = r"rows.jsonl:400: image 1 of column 'images': an image must be a file .*last.png"
    with pytest.raises(ValueError, match=text):
        load_prompts(path, COLUMNS_OF_ROWS)


@pytest.mark.parametrize(
    ("name", "content", "limits", "text"),
    [
        ("cut.png", RED[: len(RED) // 2], {}, "image 1 of the prompt: an image must be complete"),
        (
            "long.png",
            encode_image(draw_image((4200, 20))),
            {},
            "image 1 of the prompt: an image must have a size that the model's processor accepts",
        ),
        (
            "red.png",
            RED,
            {"media_limits": {"image": 0}},
            "a prompt must have at most 0 images .*media_limits.*, got 1",
        ),
    ],
)
def test_an_image_that_the_model_cannot_use_is_an_error_while_reading(
    folder, model, name, content, limits, text
):
    (folder / name).write_bytes(content)
    rows = [{"prompt": "<image>", "label": "1", "images": [image]} for image in ("pictures/red.png", name)]
    if limits:
        rows = rows[1:]
    config = Config.from_flat({"hf_checkpoint": model, "multimodal_keys": KEYS})
    config = config.with_values(engine_facts=EngineFacts(**limits))
    with pytest.raises(ValueError, match=f"rows.jsonl:{len(rows)}: {text}"):
        load_prompts(write_lines(folder / "rows.jsonl", rows), COLUMNS_OF_ROWS, media=check_for(config))


def test_a_model_of_text_is_an_error_at_the_start(folder):
    config = Config.from_flat({"hf_checkpoint": str(folder), "multimodal_keys": KEYS})
    with pytest.raises(
        ValueError, match="--multimodal-keys must be used with a model that has an image processor"
    ):
        check_for(config)


def test_image_tokens_count_for_the_limit_of_a_prompt(folder, model):
    row = {"prompt": "<image>?", "images": ["pictures/red.png"]}
    config = Config.from_flat({"hf_checkpoint": model, "multimodal_keys": KEYS})
    columns = RowColumns(input_key="prompt", multimodal_keys=KEYS, apply_chat_template=True)
    path = write_lines(folder / "rows.jsonl", [row, {"prompt": "?"}])
    options = {"tokenizer": load_tokenizer(model), "media": check_for(config)}
    prompts = load_prompts(path, columns, **options)
    lengths = prompts.lengths(np.arange(2), options["tokenizer"])
    assert lengths[0] == lengths[1] + 2 + 4  # <|vision_start|>, four tokens of the image, <|vision_end|>
    assert len(load_prompts(path, columns, max_prompt_len=int(lengths[0]), **options)) == 2
    assert len(load_prompts(path, columns, max_prompt_len=int(lengths[0]) - 1, **options)) == 1


def test_an_image_without_the_flag_names_the_flag(folder):
    row = {"prompt": [{"role": "user", "content": [{"type": "image"}]}]}
    with pytest.raises(
        ValueError, match="got {'type': 'image'}; give --multimodal-keys for images and videos"
    ):
        one_prompt(folder, row, multimodal_keys={})


def samples(folder, model, rows, **flags):
    path = write_lines(folder / "rows.jsonl", rows)
    flags = {"hf_checkpoint": model, "label_key": "label", "multimodal_keys": KEYS, **flags}
    return PromptDataSource(make_args(prompt_data=path, **flags)).get_samples(len(rows))


@pytest.mark.parametrize("templated", [True, False])
def test_samples_of_a_group_share_their_images_and_have_ids_after_expansion(
    folder, model, monkeypatch, templated
):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(folder))
    row = {"prompt": "<image>How many?", "label": "1", "images": ["pictures/red.png"]}
    if not templated:
        row["prompt"] = [{"role": "user", "content": row["prompt"]}]
    ((first, second),) = samples(folder, model, [row], apply_chat_template=templated)
    assert first.multimodal_inputs is not second.multimodal_inputs
    assert first.multimodal_inputs["images"][0] is second.multimodal_inputs["images"][0]
    state = make_state(model)
    for sample in (first, second):
        sample.tokens = state.prompt_ids(sample)
    assert first.multimodal_train_inputs == second.multimodal_train_inputs
    text = "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>How many?<|im_end|>\n<|im_start|>assistant\n"
    theirs = state.processor(text=[text], images=[draw_image((56, 56))], return_tensors="pt")
    assert first.tokens == second.tokens == theirs["input_ids"][0].tolist()
    assert torch.equal(first.multimodal_train_inputs.tensors()["pixel_values"], theirs["pixel_values"])
    assert without_media(first.prompt) == COLUMNS["prompt"].read(first)
    again = Sample.from_dict(json.loads(json.dumps(copy.deepcopy(first.to_dict()))))
    assert not lacks_references(again.multimodal_train_inputs)
    shutil.rmtree(state.media._store.folder)
    assert lacks_references(again.multimodal_train_inputs)
    asyncio.run(state.reference_images(again))
    assert not lacks_references(again.multimodal_train_inputs)
    assert again.multimodal_train_inputs == first.multimodal_train_inputs
    assert again.multimodal_inputs == first.multimodal_inputs and again.prompt == first.prompt


def make_state(model):
    return GenerateState(Config.from_flat({"hf_checkpoint": model}), None, load_tokenizer(model))


def test_images_for_a_model_of_text_are_an_error(folder, tmp_path):
    sample = Sample(prompt="a", multimodal_inputs={"images": [RED], "videos": None})
    with pytest.raises(ValueError, match="a prompt with images must be for a model with a processor"):
        make_state_of_text(tmp_path).prompt_ids(sample)


def make_state_of_text(folder):
    from rollout_double import make_tokenizer

    (folder / "text").mkdir()
    return GenerateState(Config.from_flat({"hf_checkpoint": str(folder / "text")}), None, make_tokenizer())
