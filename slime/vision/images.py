"""Reads an image of a prompt: from a path, a URL, bytes, base64 text, a record with bytes or a path, or a PIL image.

An image is decoded when its pixels are first needed. Its header is checked earlier, while the prompts are read.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import struct
import warnings
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import PIL._imaging
import PIL.Image
import PIL.ImageFile
import PIL.ImageOps

from slime.records.errors import FlagError
from slime.vision.downloads import read_url
from slime.vision.sources import find_file, find_path, inner_source, refuse_file

MOST_PIXELS = 89_478_485
"""Largest number of pixels of an image. Pillow warns above this number, because such a file can fill the memory."""
_MODES = ("1", "L", "LA", "La", "P", "PA", "RGB", "RGBA", "RGBa", "RGBX")
"""Modes of Pillow with one way to RGB. The others need a color profile or a range of values."""
_DAMAGED = (OSError, SyntaxError, ValueError, EOFError, IndexError, TypeError, struct.error, zlib.error)
"""The errors that Pillow's readers raise for damaged files."""
_ORIENTATION = 0x0112
_TRANSPOSED = (5, 6, 7, 8)
"""Values of the EXIF orientation that exchange width and height."""
_WHITE = (255, 255, 255)
_FORMS = 'a path, a file or http URL, base64 text, bytes, {"bytes": ..., "path": ...}, {"url": ...}, or a PIL image'


class PromptImage(PIL.Image.Image):
    """An image in RGB that is decoded when its pixels are first needed.

    Pickle stores the encoded bytes. `copy.copy` and `copy.deepcopy` return the image itself, so the samples of a group
    share it; `Image.copy` makes a copy that may be changed. Transparent pixels become white.
    """

    def __init__(self, encoded: bytes) -> None:
        super().__init__()
        self.encoded = encoded
        """The content of the image's file."""
        with _opened(encoded) as image:
            self._mode, self._size = "RGB", image.size
            if _orientation(image) in _TRANSPOSED:
                self._size = image.size[1], image.size[0]

    @property
    def digest(self) -> str:
        """Returns the digest of the encoded bytes, 32 hex digits."""
        return hashlib.blake2b(self.encoded, digest_size=16).hexdigest()

    def load(self) -> PIL._imaging.PixelAccess | None:
        if self._im is None:
            with _opened(self.encoded) as image, _complete():
                upright = PIL.ImageOps.exif_transpose(image) if _orientation(image) else image
                upright.load()
                self.im = to_rgb(upright).im
        return super().load()

    @contextmanager
    def decoded(self) -> Iterator[None]:
        """Frees the pixels at the end of the block, unless they were decoded before it. A later use decodes again."""
        was_decoded = self._im is not None
        yield
        if not was_decoded:
            self._im = None

    def __copy__(self) -> PromptImage:
        return self

    def __deepcopy__(self, memo: object) -> PromptImage:
        return self

    def __reduce__(self) -> tuple[type[PromptImage], tuple[bytes]]:
        return PromptImage, (self.encoded,)

    def __eq__(self, other: object) -> bool:
        return self.encoded == other.encoded if isinstance(other, PromptImage) else super().__eq__(other)

    __hash__ = None  # type: ignore[assignment]


def open_image(value: object, folder: Path | None = None) -> PromptImage:
    """Returns the image that `value` names. A relative path belongs to `folder`, or else to the working directory.

    Raises ValueError for a value without an image, for an animation, for more than `MOST_PIXELS` pixels, and for a mode
    that has no single way to RGB, such as CMYK.
    """
    if isinstance(value, PromptImage):
        return value
    return PromptImage(_read(value, folder))


def check_pixels(image: PromptImage) -> None:
    """Raises ValueError for a file that ends before its last pixel. A JPEG is decoded at an eighth of its size, which
    takes about a tenth of the time."""
    with _opened(image.encoded) as opened, _complete():
        if opened.format == "PNG":
            opened.verify()
            return
        opened.draft("RGB", (opened.width // 8, opened.height // 8))
        opened.load()


def _orientation(image: PIL.Image.Image) -> int | None:
    """Returns the orientation in the header. A PNG may have one after the pixels, which does not count."""
    if image.format == "PNG" and "exif" not in image.info:
        return None
    return image.getexif().get(_ORIENTATION)


@contextmanager
def _complete() -> Iterator[None]:
    """Turns the errors of a block that decodes an image into a ValueError."""
    try:
        yield
    except _DAMAGED as error:
        raise FlagError("an image", "be complete", str(error), "write the file again") from error


def to_rgb(image: PIL.Image.Image) -> PIL.Image.Image:
    """Returns the image in RGB, with white instead of transparent pixels."""
    if image.mode == "RGB" and "transparency" not in image.info:
        return image
    if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        image = image.convert("RGBA")
        canvas = PIL.Image.new("RGB", image.size, _WHITE)
        canvas.paste(image, mask=image.getchannel("A"))
        return canvas
    return image.convert("RGB")


def encode_png(image: PIL.Image.Image) -> bytes:
    """Returns the pixels as a PNG file."""
    buffer = io.BytesIO()
    to_rgb(image).save(buffer, format="PNG")
    return buffer.getvalue()


def _opened(encoded: bytes) -> PIL.Image.Image:
    """Opens an image and checks its header."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", PIL.Image.DecompressionBombWarning)
            image = PIL.Image.open(io.BytesIO(encoded))
    except (PIL.Image.DecompressionBombWarning, PIL.Image.DecompressionBombError) as error:
        raise FlagError(
            "an image", f"have at most {MOST_PIXELS:,} pixels", str(error), "make it smaller"
        ) from error
    except _DAMAGED as error:
        start = encoded[:12]
        raise FlagError(
            "an image", "be in a format that Pillow reads", f"bytes that begin with {start!r}", "fix the file"
        ) from error
    width, height = image.size
    if width * height > MOST_PIXELS:
        raise FlagError(
            "an image", f"have at most {MOST_PIXELS:,} pixels", f"{width} x {height}", "make it smaller"
        )
    if image.format != "MPO" and getattr(image, "n_frames", 1) > 1:  # MPO: a photo with a preview
        frames = f"{getattr(image, 'n_frames', 1)} frames of {image.format}"
        raise FlagError("an image", "be one picture", frames, "save one frame, or name the column as a video")
    if image.mode not in _MODES:
        raise FlagError(
            "an image", f"have one of the modes {', '.join(_MODES)}", image.mode, "convert it to RGB"
        )
    return image


def _read(value: object, folder: Path | None) -> bytes:
    """Returns the encoded bytes of an image."""
    found = inner_source(value) if isinstance(value, Mapping) else value
    if isinstance(found, bytes | bytearray | memoryview):
        return bytes(found)
    if isinstance(found, PIL.Image.Image):
        return encode_png(found)
    if isinstance(found, Path):
        return _read_file(found, folder)
    if isinstance(found, str) and found:
        return _read_text(found, folder)
    shown = type(value).__name__ if not isinstance(value, Mapping | str) else repr(value)[:80]
    raise FlagError("an image", f"be {_FORMS}", shown, "fix the row")


def _read_text(text: str, folder: Path | None) -> bytes:
    if (path := find_path(text)) is not None:
        return _read_file(path, folder)
    scheme = urlsplit(text[:16]).scheme
    if scheme in ("http", "https"):
        return read_url(text)
    if scheme != "data":
        return _decode(text)
    header, comma, data = text.partition(",")
    if not comma or not header.endswith(";base64"):
        raise FlagError(
            "an image", "be data:...;base64,... if it is a data URL", repr(text[:40]), "fix the row"
        )
    return _decode(data)


def _decode(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise FlagError("an image", "be valid base64", f"{text[:40]!r} ({error})", "fix the row") from error


def _read_file(path: Path, folder: Path | None) -> bytes:
    found = find_file(path, folder)
    try:
        return found.read_bytes()
    except OSError as error:
        refuse_file(path, f"{found} ({error.strerror})")
