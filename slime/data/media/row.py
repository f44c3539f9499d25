"""Puts the images and videos of a row into its messages: `<image>` in a text becomes a part of the message's content.

A part that names an image of its own, such as `{"type": "image_url", ...}`, keeps it. A part without one takes the next
value of the column.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, cast

from slime.data.files import Row, RowLocation, parse_json
from slime.records.errors import FlagError
from slime.types import Message
from slime.vision.sources import PARTS, read_part_source, require_file

if TYPE_CHECKING:
    from slime.vision.images import PromptImage

T = TypeVar("T")

KINDS = ("image", "video")
"""The keys of --multimodal-keys."""
_MARKERS = re.compile("|".join(f"<{kind}>" for kind in KINDS))


class RowMedia:
    """The images and videos of one row, in the order in which its messages name them."""

    def __init__(self, row: Row, keys: Mapping[str, object], where: RowLocation) -> None:
        self._where, self._keys = where, keys
        files = where.source.files
        self._folder = files[0].parent if files else None
        self._values = {kind: _listed(row, str(key)) for kind, key in keys.items()}
        self._used = dict.fromkeys(self._values, 0)
        self.images: list[PromptImage] = []
        self.videos: list[object] = []

    def require_files(self) -> None:
        """Raises ValueError with file and line for an image of the columns whose file does not exist."""
        for number, value in enumerate(self._values.get("image", ())):
            try:
                require_file(value, self._folder)
            except FlagError as error:
                name = f"image {number + 1} of column {self._keys['image']!r}"
                raise error.after(f"{self._where}: {name}: ") from error

    def has_markers(self, text: str) -> bool:
        """Returns true for a text with `<image>` or `<video>` of a key. Such a text is the message of a user."""
        return any(match[0][1:-1] in self._keys for match in _MARKERS.finditer(text))

    def split(self, text: str) -> str | list[Message]:
        """Returns a text with markers as a list of parts, and another text unchanged."""
        found = [match for match in _MARKERS.finditer(text) if match[0][1:-1] in self._keys]
        if not found:
            return text
        parts: list[Message] = []
        done = 0
        for match in found:
            if before := text[done : match.start()]:
                parts.append({"type": "text", "text": before})
            parts.append(self._next(match[0][1:-1]))
            done = match.end()
        return [*parts, {"type": "text", "text": text[done:]}] if text[done:] else parts

    def read_part(self, part: object) -> Message | None:
        """Returns an image or a video that is a part of a message's content, or None for another part."""
        kind, value = read_part_source(part)
        if kind is None:
            return None
        if value is None:
            return self._next(kind)
        return self._part(kind, value, f"the {kind} in a message")

    def take_all(self) -> None:
        """Reads all values of the columns, for a prompt whose text has the model's own markers."""
        for kind, values in self._values.items():
            for _ in values[self._used[kind] :]:
                self._next(kind)

    def require_all_used(self) -> None:
        """Raises ValueError unless the messages have named all values of the columns."""
        for kind, values in self._values.items():
            if (used := self._used[kind]) < len(values):
                raise self._wrong_number(
                    kind, f"{used} for {len(values)} {kind}s of column {self._keys[kind]!r}"
                )

    def _next(self, kind: str) -> Message:
        number, values = self._used.get(kind, 0), self._values.get(kind, [])
        if number >= len(values):
            name = (
                f"of column {self._keys[kind]!r}"
                if kind in self._keys
                else "without a key in --multimodal-keys"
            )
            raise self._wrong_number(kind, f"more than {len(values)} for {len(values)} {kind}s {name}")
        self._used[kind] += 1
        return self._part(kind, values[number], f"{kind} {number + 1} of column {self._keys[kind]!r}")

    def _part(self, kind: str, value: object, name: str) -> Message:
        if kind == "video":
            self.videos.append(self._video(value, name))
            return {"type": kind, kind: self.videos[-1]}
        self.images.append(self._image(value, name))
        return {"type": kind, kind: self.images[-1]}

    def _image(self, value: object, name: str) -> PromptImage:
        from slime.vision.images import open_image

        try:
            return open_image(value, self._folder)
        except FlagError as error:
            raise error.after(f"{self._where}: {name}: ") from error

    def _video(self, value: object, name: str) -> object:
        """Returns a list of frames, or the path of a file that exists."""
        if isinstance(value, list | tuple):
            return [self._image(frame, f"frame {i + 1} of {name}") for i, frame in enumerate(value)]
        if isinstance(value, Mapping):
            value = value.get("path") or value.get("video") or value.get("url")
        path = Path(str(value).removeprefix("file://"))
        tried = [path] if self._folder is None or path.is_absolute() else [self._folder / path, path]
        found = next((one for one in tried if one.is_file()), None)
        if not value or found is None:
            raise FlagError(
                f"{self._where}: {name}",
                "be a file, or a list of frames",
                f"no file {' and no file '.join(map(str, tried))}",
                "restore it, or fix the row",
            )
        return str(found.resolve())

    def _wrong_number(self, kind: str, got: str) -> FlagError:
        return FlagError(
            f"{self._where}: the prompt",
            f"have one <{kind}> per {kind}",
            got,
            f"write <{kind}> where each {kind} belongs, or check --multimodal-keys",
        )


def _listed(row: Row, key: str) -> list[object]:
    """Returns the values of a cell. The cell may have one value, a list, or the JSON text of a list."""
    value = row.get(key)
    if value is None or value == "":
        return []
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            value = parse_json(value)
        except ValueError:
            return [value]
    return list(value) if isinstance(value, list | tuple) else [value]


def without_media(prompt: T) -> T:
    """Returns messages whose images and videos are markers without content. A text stays as it is."""
    if not isinstance(prompt, list):
        return prompt
    return cast("T", [_without_media(message) for message in prompt])


def _without_media(message: Message) -> Message:
    content = message.get("content")
    if not isinstance(content, list):
        return message
    return {**message, "content": [_bare(part) for part in content]}


def _bare(part: object) -> object:
    if isinstance(part, Mapping) and (kind := PARTS.get(str(part.get("type")))):
        return {"type": kind}
    return part
