"""Tests the small copies of images that the page of a run shows."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path

import PIL.Image
from vision_cases import draw_image

from slime.tracking.samples import IMAGES, SAMPLES, read_samples, write_samples
from slime.types import Sample
from slime.vision.thumbnails import content_text, read_thumbnail, write_thumbnails
from vime.view.page.sample_rows import SampleRows


def make_sample(prompt: object, images: list[object]) -> Sample:
    sample = Sample(
        index=0, group_index=0, prompt=prompt, multimodal_inputs={"images": images, "videos": None}
    )
    sample.tokens, sample.response, sample.reward = [1, 2], "b", 1.0
    sample.response_length, sample.status = 1, Sample.Status.COMPLETED
    return sample


def test_a_run_keeps_each_image_once_and_the_page_shows_it(tmp_path: Path) -> None:
    large, small = draw_image((800, 400), "red"), draw_image((20, 10), "blue")
    parts = [{"type": "image", "image": small}, {"type": "text", "text": "which?"}]
    samples = [
        make_sample([{"role": "user", "content": parts}], [small, large]),
        make_sample("a", [small, "no file"]),
    ]
    write_samples(tmp_path, 3, samples, [0, 1], str)
    files = sorted(path.name for path in (tmp_path / SAMPLES / IMAGES).iterdir())
    first, second = read_samples(tmp_path, 3)
    assert sorted(first.images) == files and len(files) == 2
    assert second.images == first.images[:1], "an image that cannot be read is left out"
    shown = SampleRows(tmp_path).whole(3, 0)
    json.dumps(shown)
    sizes = []
    for url in shown["images"]:
        image = PIL.Image.open(io.BytesIO(base64.b64decode(url.removeprefix("data:image/png;base64,"))))
        sizes.append(image.size)
    assert sizes == [(20, 10), (384, 192)]
    (row, _) = SampleRows(tmp_path).since(0)[0][3]
    assert "[image]which?" in row and SampleRows(tmp_path).find("WHICH", 0)[0] == [[3, 0]]


def test_a_name_reaches_no_file_outside_the_folder(tmp_path: Path) -> None:
    (tmp_path / "secret.png").write_bytes(b"x")
    (name,) = write_thumbnails(tmp_path / "in", {"images": [draw_image()]})
    assert read_thumbnail(tmp_path / "in", name) is not None
    for wrong in ("../secret.png", "secret.png", "", f"../in/{name}", "0" * 32 + ".png"):
        assert read_thumbnail(tmp_path / "in", wrong) is None
    assert write_thumbnails(tmp_path / "other", None) == [] and not (tmp_path / "other").exists()


def test_content_without_text_is_named() -> None:
    assert content_text([{"type": "video"}, {"type": "text", "text": "a"}, "b"]) == "[video]ab"
    assert content_text("a") == "a" and content_text(None) == ""
