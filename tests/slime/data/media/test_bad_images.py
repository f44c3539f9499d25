"""Images that a run cannot use are errors with file and line while the prompts are read, for the processor of each
family. Images that look odd and are fine are read."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
from rollout_double import write_lines
from vision_cases import PROCESSORS, draw_image, encode_image, write_processor

from slime.bridges.processors import has_torchvision
from slime.config import Config
from slime.config.sections.engine import EngineFacts
from slime.data.limits.context import ContextLimits
from slime.data.media.check import check_for
from slime.data.prompts import Prompts, load_prompts
from slime.data.rows import RowColumns
from slime.data.tokenizer import load_tokenizer

KEYS = {"image": "images"}
PICTURE = draw_image((56, 56))
PNG = encode_image(PICTURE)


def frames(kind: str) -> bytes:
    return encode_image(PICTURE, kind, save_all=True, append_images=[draw_image((56, 56), "blue")])


@pytest.fixture(scope="module", params=PROCESSORS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_processor(tmp_path_factory.mktemp(request.param) / "m", request.param)


def read(folder: Path, model: str, rows: list[dict[str, Any]], limits: Any = None, **options: Any) -> Prompts:
    config = Config.from_flat({"hf_checkpoint": model, "multimodal_keys": KEYS})
    facts = EngineFacts(media_limits=limits or {}, flag_of={"media_limits": "--vllm-limit-mm-per-prompt"})
    media = check_for(config.with_values(engine_facts=facts))
    columns = RowColumns(input_key="prompt", multimodal_keys=KEYS, apply_chat_template=True)
    path = write_lines(folder / "rows.jsonl", rows)
    return load_prompts(path, columns, tokenizer=load_tokenizer(model), media=media, **options)


IN_COLUMN = "rows.jsonl:2: image 1 of column 'images': an image must "
WRONG = {
    "no image": (b"no image at all", IN_COLUMN + "be in a format that Pillow reads, got bytes that begin with b'no im"),
    "a page": (b"<html>404</html>", IN_COLUMN + "be in a format that Pillow reads, got bytes that begin with b'<html>"),
    "zero bytes": (b"", IN_COLUMN + "be in a format that Pillow reads, got bytes that begin with b''"),
    "100 megapixels": (
        encode_image(PIL.Image.new("1", (10_000, 10_000))),
        IN_COLUMN + "have at most 89,478,485 pixels, got .*; make it smaller",
    ),
    "animated GIF": (frames("GIF"), IN_COLUMN + "be one picture, got 2 frames of GIF; save one frame, or name the col"),
    "animated WEBP": (frames("WEBP"), IN_COLUMN + "be one picture, got 2 frames of WEBP"),
    "CMYK": (encode_image(PICTURE.convert("CMYK"), "JPEG"), IN_COLUMN + "have one of .*, got CMYK; convert it to RGB"),
    "16-bit": (encode_image(PIL.Image.new("I;16", (56, 56))), IN_COLUMN + "have one of .*, got I;16; convert it"),
    "half a file": (PNG[: len(PNG) // 2], "rows.jsonl:2: image 1 of the prompt: an image must be complete, got"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_file_that_is_no_usable_image_is_an_error(model: str, tmp_path: Path, name: str) -> None:
    content, text = WRONG[name]
    (tmp_path / "good.png").write_bytes(PNG)
    (tmp_path / "bad.png").write_bytes(content)
    rows = [{"prompt": "<image>?", "images": [file]} for file in ("good.png", "bad.png")]
    with pytest.raises(ValueError, match=text):
        read(tmp_path, model, rows)


def test_a_long_strip_is_an_error_for_a_processor_that_refuses_it(model: str, tmp_path: Path) -> None:
    encode = encode_image(PIL.Image.new("RGB", (6000, 29), "red"))
    (tmp_path / "long.png").write_bytes(encode)
    rows = [{"prompt": "<image>?", "images": ["long.png"]}]
    if "gemma3" in model:  # it makes every image a square
        assert len(read(tmp_path, model, rows)) == 1
        return
    text = (
        r"rows.jsonl:1: image 1 of the prompt: an image must have a size that the model's processor accepts, got "
        r"6000 x 29 pixels \(absolute aspect ratio must be smaller than 200, .*; crop it, or leave the row out"
    )
    with pytest.raises(ValueError, match=text):
        read(tmp_path, model, rows)


@pytest.mark.parametrize(
    ("prompt", "images", "limits", "text"),
    [
        ("<image><image>?", 1, {}, "have one <image> per image, got more than 1 for 1 images of column 'images'"),
        ("<image>?", 2, {}, "have one <image> per image, got 1 for 2 images of column 'images'"),
        ("no marker", 1, {}, "have one <image> per image, got 0 for 1 images of column 'images'"),
        ("MARK<image>?", 1, {}, "have one MARK per image, got 2 for 1 images; write <image> where each"),
        ("<image>" * 3, 3, {"image": 2}, "have at most 2 images .--vllm-limit-mm-per-prompt., got 3; raise"),
    ],
)  # fmt: skip
def test_a_wrong_number_of_images_is_an_error(
    model: str, tmp_path: Path, prompt: str, images: int, limits: dict[str, int], text: str
) -> None:
    marker = "<start_of_image>" if "gemma3" in model else "<|image_pad|>"
    (tmp_path / "a.png").write_bytes(PNG)
    prompt, text = prompt.replace("MARK", marker), text.replace("MARK", marker.replace("|", r"\|"))
    with pytest.raises(ValueError, match=f"rows.jsonl:1: (the|a) prompt( of text)? must {text}"):
        read(tmp_path, model, [{"prompt": prompt, "images": ["a.png"] * images}], limits)


def test_a_missing_file_in_row_5000_is_found_while_reading(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"prompt": str(number), "images": []} for number in range(5000)]
    rows[-1] = {"prompt": "<image>", "images": ["gone.png"]}
    columns = RowColumns(input_key="prompt", multimodal_keys=KEYS)
    text = "rows.jsonl:5000: image 1 of column 'images': an image must be a file that can be read, got no file .*gone.p"
    with pytest.raises(ValueError, match=text):
        load_prompts(write_lines(tmp_path / "rows.jsonl", rows), columns)


def test_an_image_that_leaves_no_room_is_left_out_or_an_error(model: str, tmp_path: Path) -> None:
    """The text is short. The ids of the image count."""
    (tmp_path / "a.png").write_bytes(encode_image(draw_image((84, 56))))
    rows = [{"prompt": "<image>?", "images": ["a.png"]}, {"prompt": "?", "images": []}]
    tokenizer = load_tokenizer(model)
    with_image, without = read(tmp_path, model, rows).lengths(np.arange(2), tokenizer)
    assert with_image >= without + 4
    assert len(read(tmp_path, model, rows, max_prompt_len=int(with_image) - 1)) == 1
    with pytest.raises(
        ValueError, match=f"--rollout-max-prompt-len must leave at least one prompt, got {without}"
    ):
        read(tmp_path, model, rows[:1], max_prompt_len=int(without))
    rows[0]["images"], rows[0]["prompt"] = ["a.png"] * 80, "<image>" * 80
    limits = ContextLimits(200, lambda: tokenizer, setting="--vllm-max-model-len")
    with pytest.raises(
        ValueError, match="200 tokens .--vllm-max-model-len.*the longest has .* at .*rows.jsonl:1"
    ):
        read(tmp_path, model, rows, context=limits)


@pytest.mark.skipif(has_torchvision(), reason="videos can be processed here")
def test_a_video_without_torchvision_is_an_error(tmp_path: Path) -> None:
    model = write_processor(tmp_path / "m")
    (tmp_path / "a.mp4").write_bytes(b"video")
    rows = [{"prompt": "<video>?", "videos": ["a.mp4"]}]
    config = Config.from_flat({"hf_checkpoint": model, "multimodal_keys": {"video": "videos"}})
    columns = RowColumns(input_key="prompt", multimodal_keys={"video": "videos"}, apply_chat_template=True)
    text = "rows.jsonl:1: a prompt must have videos only if torchvision is installed, .*, got 1 without torchvision"
    with pytest.raises(ValueError, match=text):
        path = write_lines(tmp_path / "rows.jsonl", rows)
        load_prompts(path, columns, tokenizer=load_tokenizer(model), media=check_for(config))


def test_odd_images_are_read(tmp_path: Path) -> None:
    """As `datasets` and transformers read them: upright, and gray as three channels. Clear pixels become white."""
    clear = PIL.Image.new("RGBA", (4, 4), (10, 20, 30, 0)).convert("P")
    exif = PIL.Image.Exif()
    exif[0x0112] = 8
    photo = draw_image((40, 20)).convert("L")
    photo.save(tmp_path / "turned.jpg", exif=exif)
    (tmp_path / "clear.png").write_bytes(encode_image(clear, transparency=0))
    (tmp_path / "gray.png").write_bytes(encode_image(photo))
    names = ["turned.jpg", "clear.png", "gray.png", "gray.png"]
    rows = [{"prompt": "<image>" * 4, "images": names}]
    columns = RowColumns(input_key="prompt", multimodal_keys=KEYS)
    (prompt,) = load_prompts(write_lines(tmp_path / "rows.jsonl", rows), columns)
    turned, white, gray, same = prompt.images
    assert turned.size == (20, 40) and white.getpixel((1, 1)) == (255, 255, 255) and gray.mode == "RGB"
    theirs = PIL.ImageOps.exif_transpose(PIL.Image.open(tmp_path / "turned.jpg")).convert("RGB")
    assert np.array_equal(np.asarray(turned), np.asarray(theirs))
    assert same == gray and base64.b64encode(same.encoded) == base64.b64encode(gray.encoded)
    assert [part["type"] for part in prompt.text[0]["content"]] == ["image"] * 4
