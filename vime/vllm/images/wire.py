"""Defines how a request names its images and videos.

A request contains the path of each processed image, and the engine's server reads the file. A server on another host
may lack the file. It then answers with the status `MISSING`, and the client repeats the request with the content of the
files. Files have the format safetensors, which holds tensors only, so no request can run code in the server.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

if TYPE_CHECKING:
    from slime.vision.inputs import ImageInputs

IMAGES_FIELD = "vime_images"
"""Shared parameter: the images and videos of the prompt, in its order."""
MISSING = 412
"""HTTP status of a server that lacks a file. "Precondition failed" is not repeated by routers."""


class WireImage(msgspec.Struct, omit_defaults=True):
    """One processed image or video of a request."""

    kind: Literal["image", "video"]
    key: str
    """Digest of the content and of the processor's settings; the key of the engine's cache of tower outputs."""
    tokens: int
    """Number of ids that stand for the image in the prompt."""
    path: str
    start: int | None = None
    """Index of the first of these ids in the prompt, or None to search for it."""
    data: bytes = b""
    """Content of the file, for a server that lacks it."""


class MissingFilesError(Exception):
    """The server lacks files of a request, and the request does not contain them."""


def describe(images: ImageInputs) -> list[WireImage]:
    """Returns the images of a request without their content."""
    return [WireImage(item.kind, item.key, item.tokens, item.path, item.start) for item in images.items]


def with_content(images: Iterable[WireImage]) -> list[WireImage]:
    """Returns the images with the content of their files."""
    return [msgspec.structs.replace(one, data=Path(one.path).read_bytes()) for one in images]


def parse_images(value: object) -> list[WireImage]:
    """Reads the field of a request. Raises ValueError for a value of another form."""
    try:
        return msgspec.convert(value, list[WireImage], strict=True)
    except msgspec.ValidationError as error:
        raise ValueError(
            f"{IMAGES_FIELD} must be a list of images, got {error}; leave the field out"
        ) from error


def missing_files(images: Sequence[WireImage]) -> list[str]:
    """Returns the paths that this host cannot read and whose content the request lacks."""
    return [one.path for one in images if not one.data and not Path(one.path).is_file()]
