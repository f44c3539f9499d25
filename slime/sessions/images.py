"""Reads the images in requests of OpenAI's chat, OpenAI's Responses and Anthropic's messages.

A request contains an image as base64. An address is an error, because the agent may be untrusted, and the run's host
must not read files or pages for an agent.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from slime.sessions.messages import RequestRejected, get_text
from slime.types import Message

if TYPE_CHECKING:
    from slime.vision.images import PromptImage

_IMAGES = ("image_url", "input_image", "image")
"""The types of image parts: OpenAI's chat, OpenAI's Responses, Anthropic's messages."""
Content = str | list[dict[str, object]]
"""Content of a message: a text, or parts of text and images in the form that chat templates read."""


def get_content(content: object) -> Content:
    """Returns the content of a user's or a tool's message. Raises RequestRejected for a part that is neither text nor
    an image."""
    if not isinstance(content, list) or not any(map(_is_image, content)):
        return get_text(content)
    found: list[dict[str, object]] = []
    for part in content:
        if _is_image(part):
            found.append({"type": "image", "image": _open(part)})
        else:
            found.append({"type": "text", "text": get_text([part])})
    return found


def list_images(messages: Sequence[Message]) -> list[PromptImage]:
    """Returns the images of the messages, in their order."""
    parts = (
        part for message in messages if isinstance(message["content"], list) for part in message["content"]
    )
    return [part["image"] for part in parts if part["type"] == "image"]


def _is_image(part: object) -> bool:
    return isinstance(part, Mapping) and part.get("type") in _IMAGES


def _open(part: Mapping[str, object]) -> PromptImage:
    from slime.vision.images import PromptImage

    encoded = _decode(part)
    try:
        return PromptImage(encoded)
    except ValueError as error:
        raise RequestRejected(
            "media", f"an image of a request must be readable, got {error}; send a PNG or a JPEG"
        ) from error


def _decode(part: Mapping[str, object]) -> bytes:
    """Returns the bytes of the image's file."""
    source = part.get("source")
    if isinstance(source, Mapping):  # Anthropic
        data = source.get("data") if source.get("type") == "base64" else source.get("url")
        is_base64 = source.get("type") == "base64"
    else:
        found = part.get("image_url")
        url = found.get("url") if isinstance(found, Mapping) else found
        head, _, data = str(url).partition(",")
        is_base64 = head.startswith("data:") and head.endswith(";base64")
        data = data if is_base64 else url
    if not is_base64 or not isinstance(data, str):
        raise RequestRejected(
            "media",
            f"an image of a request must be its content in base64, got {data!r:.80}; send data:image/png;base64,... "
            "or a source of type base64",
        )
    try:
        return base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError) as error:
        raise RequestRejected(
            "media", f"an image must be valid base64, got {data[:40]!r} ({error}); fix the client"
        ) from error
