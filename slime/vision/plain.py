"""Images and references to processed images as JSON values, for a saved record of a sample."""

from __future__ import annotations

import base64
from dataclasses import asdict

from slime.vision.inputs import ImageInputs, MediaFile

_IMAGE, _INPUTS = "base64 of an image", "processed images"
"""Keys of the records."""


def media_as_plain(value: object) -> object:
    """Converts images and references inside of lists and dicts. Returns another value unchanged."""
    if isinstance(value, ImageInputs):
        return {_INPUTS: [asdict(item) for item in value.items]}
    if isinstance(value, dict):
        return {name: media_as_plain(one) for name, one in value.items()}
    if isinstance(value, list):
        return [media_as_plain(one) for one in value]
    if value is None or isinstance(value, str | int | float):
        return value
    import PIL.Image

    from slime.vision.images import PromptImage, encode_png

    if not isinstance(value, PIL.Image.Image):
        return value
    encoded = value.encoded if isinstance(value, PromptImage) else encode_png(value)
    return {_IMAGE: base64.b64encode(encoded).decode()}


def media_from_plain(value: object) -> object:
    """Returns the value from which `media_as_plain` made `value`."""
    if isinstance(value, list):
        return [media_from_plain(one) for one in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {_IMAGE}:
        from slime.vision.images import PromptImage

        return PromptImage(base64.b64decode(value[_IMAGE]))
    if value.keys() == {_INPUTS}:
        items = (MediaFile(**{**one, "grid": tuple(one["grid"])}) for one in value[_INPUTS])
        return ImageInputs(tuple(items))
    return {name: media_from_plain(one) for name, one in value.items()}
