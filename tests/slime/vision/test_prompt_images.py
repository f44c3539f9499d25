"""Tests of slime.vision.images: the forms of an image, and images that a run cannot use."""

import base64
import copy
import http.server
import pickle
import threading

import numpy as np
import PIL.Image
import pytest
from vision_cases import draw_image, encode_image

from slime.vision import images
from slime.vision.images import PromptImage, check_pixels, open_image

PICTURE = draw_image((12, 8))
PNG = encode_image(PICTURE)


def pixels(image):
    return np.asarray(image).tolist()


@pytest.fixture
def stored(tmp_path):
    (tmp_path / "one two.png").write_bytes(PNG)
    return tmp_path


def test_every_form_gives_the_same_image(stored):
    path = stored / "one two.png"
    text = base64.b64encode(PNG).decode()
    forms = [
        *(str(path), path, path.as_uri(), PNG, bytearray(PNG), PICTURE),
        *({"bytes": PNG, "path": "gone.png"}, {"bytes": None, "path": str(path)}, {"url": path.as_uri()}),
        *({"image_url": {"url": f"data:image/png;base64,{text}"}}, f"data:image/png;base64,{text}"),
        encode_image(draw_image((40, 30))),
    ]
    found = [open_image(form) for form in forms]
    assert [image.size for image in found] == [(12, 8)] * 11 + [(40, 30)]
    assert all(pixels(image) == pixels(PICTURE) and image.mode == "RGB" for image in found[:-1])
    assert len({image.digest for image in found}) == 2
    assert open_image("one two.png", stored) == found[0]
    long = encode_image(draw_image((64, 64)), "BMP")
    assert open_image(base64.b64encode(long).decode()).size == (64, 64)


def test_an_image_is_decoded_when_its_pixels_are_needed_and_pickles_as_its_file():
    image = PromptImage(PNG)
    assert image._im is None and image.size == (12, 8)
    group = [copy.deepcopy({"images": [image]}) for _ in range(8)]
    assert all(one["images"][0] is image for one in group)
    with image.decoded():
        assert pixels(image) == pixels(PICTURE)
    assert image._im is None
    assert len(pickle.dumps(image)) < len(PNG) + 200
    assert pixels(pickle.loads(pickle.dumps(image))) == pixels(PICTURE)
    assert image.copy() is not image and image.resize((3, 2)).size == (3, 2)
    assert image.getpixel((0, 0)) == (255, 255, 255)


def test_transparent_pixels_become_white_and_photos_stand_upright():
    clear = PIL.Image.new("RGBA", (4, 4), (10, 20, 30, 0))
    clear.putpixel((0, 0), (10, 20, 30, 255))
    found = open_image(encode_image(clear))
    assert found.getpixel((0, 0)) == (10, 20, 30) and found.getpixel((1, 1)) == (255, 255, 255)
    palette = clear.convert("P")
    palette.info["transparency"] = 0
    assert open_image(encode_image(palette, transparency=0)).mode == "RGB"
    exif = PIL.Image.Exif()
    exif[0x0112] = 6
    turned = open_image(encode_image(PICTURE, "JPEG", exif=exif, quality=95))
    assert turned.size == (8, 12) and np.asarray(turned).shape == (12, 8, 3)


def many(kind, **options):
    frames = [draw_image((12, 8), color) for color in ("red", "blue")]
    return encode_image(frames[0], kind, save_all=True, append_images=frames[1:], **options)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (b"no image at all", "be in a format that Pillow reads, got bytes that begin with b'no image at "),
        (b"", "be in a format that Pillow reads"),
        (PNG[:20], "be in a format that Pillow reads"),
        (many("GIF"), "be one picture, got 2 frames of GIF"),
        (many("PNG"), "be one picture, got 2 frames of PNG"),
        (many("TIFF"), "be one picture, got 2 frames of TIFF"),
        (
            encode_image(PICTURE.convert("CMYK"), "JPEG"),
            "have one of the modes .*, got CMYK; convert it to RGB",
        ),
        (encode_image(PIL.Image.new("I;16", (4, 4))), "have one of the modes .*, got I;16"),
        (
            encode_image(PIL.Image.new("1", (10_000, 10_000))),
            "have at most 89,478,485 pixels, got Image",
        ),
        (encode_image(PIL.Image.new("1", (20_000, 10_000))), "have at most 89,478,485 pixels"),
        ("missing.png", "be a file that can be read, got no file missing.png; restore missing.png"),
        ("/", "be a file that can be read, got / .Is a directory"),
        ("data:image/png,abc", "be data:...;base64,... if it is a data URL"),
        ("data:image/png;base64,§§", "be valid base64"),
        ("http://127.0.0.1:9/a.png", "be at an address that answers, got .*refused"),
        (17, "be a path, a file or http URL, .*, got int"),
        ({"size": 3}, "be a path, .*, got {'size': 3}"),
        ("", "be a path, .*, got ''"),
    ],
)
def test_an_image_that_a_run_cannot_use_is_an_error(value, text):
    with pytest.raises(ValueError, match=f"^an image must {text}"):
        open_image(value)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "GIF", "BMP"])
def test_a_file_that_ends_too_early_is_found_without_its_pixels(kind):
    whole = encode_image(draw_image((400, 300)), kind)
    check_pixels(PromptImage(whole))
    rule = "an image must be (complete, got .*; write the file again|in a format .*WEBP)"
    with pytest.raises(ValueError, match=rule):
        check_pixels(PromptImage(whole[: len(whole) // 2]))


def test_a_url_is_downloaded_once(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path))
    asked = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            self.send_response(200 if self.path == "/a.png" else 404)
            self.end_headers()
            self.wfile.write(PNG)

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        address = f"http://127.0.0.1:{server.server_port}"
        assert open_image(f"{address}/a.png") == open_image({"url": f"{address}/a.png"})
        assert asked == ["/a.png"]
        with pytest.raises(
            ValueError, match=r"must be at an address that answers, got .*/b.png \(HTTP Error 404"
        ):
            open_image(f"{address}/b.png")
        server.shutdown()
        thread.join()


def test_an_image_of_a_plug_in_is_encoded_as_png():
    gray = PICTURE.convert("L")
    assert pixels(open_image(images.encode_png(gray))) == pixels(gray.convert("RGB"))
