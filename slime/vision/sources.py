"""The forms in which rows and messages name an image or a video, and the files that they name. Imports no Pillow."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal, NoReturn
from urllib.parse import unquote, urlsplit

from slime.records.errors import FlagError

PARTS: dict[str, Literal["image", "video"]] = {
    **dict.fromkeys(("image", "image_url", "input_image"), "image"),
    **dict.fromkeys(("video", "video_url"), "video"),
}
"""Type of a part in the forms of transformers, OpenAI's chats and Responses -> kind."""


def read_part_source(part: object) -> tuple[Literal["image", "video"] | None, object]:
    """Returns kind and value of an image or a video in a message's content. The kind is None for another part, and the
    value is None for a part that names no image or video."""
    if not isinstance(part, Mapping) or (kind := PARTS.get(str(part.get("type")))) is None:
        return None, None
    names = (str(part["type"]), kind, "url", "path")
    value = next((part[name] for name in names if part.get(name)), None)
    if isinstance(value, Mapping) and "url" in value:
        value = value["url"]
    return kind, value


def require_file(value: object, folder: Path | None) -> None:
    """Raises ValueError if `value` names a file that does not exist. Returns at once for bytes, base64 texts, http
    URLs."""
    if isinstance(value, Mapping):
        value = inner_source(value)
    path = Path(value) if isinstance(value, Path) else find_path(value) if isinstance(value, str) else None
    if path is not None:
        find_file(path, folder)


def inner_source(record: Mapping[str, object]) -> object:
    """Returns the image of a record, or None."""
    names = ("bytes", "path", "url", "image_url", "image")
    found = next((record[name] for name in names if record.get(name) is not None), None)
    return inner_source(found) if isinstance(found, Mapping) else found


def find_path(text: str) -> Path | None:
    """Returns the path that a text names, or None for a text that holds or links an image."""
    if len(text) > 4096 or (len(text) > 255 and "." not in text):  # longer than any path
        return None
    scheme = urlsplit(text[:16]).scheme
    if scheme == "file":
        return Path(unquote(urlsplit(text).path))
    return None if scheme in ("data", "http", "https") else Path(text)


def find_file(path: Path, folder: Path | None) -> Path:
    """Returns the path of an existing file. A relative path belongs to `folder`, or else to the working directory."""
    tried = [path] if folder is None or path.is_absolute() else [folder / path, path]
    found = next((one for one in tried if one.exists()), None)
    if found is None:
        refuse_file(path, f"no file {' and no file '.join(map(str, tried))}")
    return found


def refuse_file(path: Path, got: str) -> NoReturn:
    raise FlagError("an image", "be a file that can be read", got, f"restore {path.name}, or fix the row")
