"""Makes the parts of a run's page that show a sample's images: one small copy per distinct image, and their text."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping
from pathlib import Path

MOST_IMAGES = 16
"""Number of first images of a sample that are copied."""
_SIDE = 384
_NAME = re.compile(r"[0-9a-f]{32}\.png")


def write_thumbnails(folder: Path, inputs: Mapping[str, object] | None) -> list[str]:
    """Writes the images of `Sample.multimodal_inputs` that the folder lacks. Returns the names of the files in the
    order of the images. An image that cannot be read is left out."""
    images = (inputs or {}).get("images")
    if not isinstance(images, list | tuple):
        return []
    names = (_write(folder, image) for image in images[:MOST_IMAGES])
    return [name for name in names if name is not None]


def _write(folder: Path, value: object) -> str | None:
    from slime.vision.images import open_image

    try:
        image = open_image(value)
        name = f"{hashlib.blake2b(image.encoded, digest_size=16).hexdigest()}.png"
        if (folder / name).exists():
            return name
        small = image.copy()
    except ValueError:
        return None
    small.thumbnail((_SIDE, _SIDE))
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / f"{name}.tmp"
    small.save(temporary, format="PNG")
    temporary.rename(folder / name)
    return name


def read_thumbnail(folder: Path, name: str) -> str | None:
    """Returns the image as a data URL, or None if there is no such file."""
    path = folder / name
    if not _NAME.fullmatch(name) or not path.is_file():
        return None
    return f"data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()}"


def content_text(content: object) -> str:
    """Returns a message's content as a text. A part that is not text, such as an image, is its type in brackets."""
    if not isinstance(content, list):
        return str(content or "")
    return "".join(
        str(part.get("text", f"[{part.get('type')}]")) if isinstance(part, dict) else str(part)
        for part in content
    )


def value_text(value: object) -> str:
    """Returns a value without a form in JSON as text. An image of a message is in a file."""
    return "in a file" if hasattr(value, "encoded") else str(value)
