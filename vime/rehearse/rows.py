"""The data of a rehearsal: the first rows of the user's file, or rows made in the format that the flags declare."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from slime.data.prompts import read_file
from slime.vision.sources import find_path
from vime.rehearse.changes import Flags
from vime.rehearse.fitting import SFT

ROWS = 16
PIXELS = 56


def take_rows(flags: Flags, folder: Path, base: Path) -> str:
    """Points --prompt-data to a few rows, and returns where they are from. Paths are relative to `base`."""
    words = flags.values("prompt_data") or []
    if not words:
        return "no --prompt-data"
    path = next((word for word in words if "/" in word or "." in word), words[-1])
    source = base / path.partition("@[")[0]
    file = folder / "rows.jsonl"
    if source.exists():
        at = source if source.is_dir() else source.parent
        rows = []
        for row in read_file(str(base / path)):
            rows.append(dict(row) | {name: _locate(row[name], at) for name in _media(flags) if name in row})
            if len(rows) == ROWS:
                break
        origin = f"the first {len(rows)} rows of {path}"
    else:
        rows = [make_row(flags, number) for number in range(ROWS)]
        origin = f"{ROWS} rows made in the declared format, because {path} is not on this machine"
    file.write_text("".join(json.dumps(row, default=_as_text) + "\n" for row in rows), encoding="utf-8")
    flags.set("prompt_data", origin, file)
    return origin


def _media(flags: Flags) -> Iterable[str]:
    """Returns the columns of images. For a value that is no JSON object, the run itself reports the problem."""
    try:
        keys = json.loads(flags.value("multimodal_keys") or "{}")
    except ValueError:
        return []
    return keys.values() if isinstance(keys, dict) else []


def _locate(value: object, folder: Path) -> object:
    """Returns the images of a column with the paths of files in `folder` made absolute, because the rows move."""
    if isinstance(value, list | tuple):
        return [_locate(one, folder) for one in value]
    if isinstance(value, Mapping):
        return {name: _locate(one, folder) for name, one in value.items()}
    path = find_path(value) if isinstance(value, str) else None
    return value if path is None or not (folder / path).exists() else str((folder / path).resolve())


def _as_text(value: object) -> str:
    if isinstance(value, bytes):  # an image in a parquet file
        return f"data:image/png;base64,{base64.b64encode(value).decode()}"
    return str(value)


def _draw_image() -> str:
    from PIL import Image

    from slime.vision.images import encode_png

    return _as_text(encode_png(Image.new("RGB", (PIXELS, PIXELS), "red")))


def make_row(flags: Flags, number: int) -> dict[str, object]:
    """Returns one row of addition with the columns that the flags name."""
    a, b = 3 * number + 11, 7 * number + 5
    columns = list(_media(flags))
    question = "<image>" * len(columns) + f"{a}+{b}="
    turns: list[dict[str, str]] = [{"role": "user", "content": question}]
    trains = flags.value("loss_type") == SFT
    if trains:
        turns.append({"role": "assistant", "content": str(a + b)})
    row: dict[str, object] = {column: [_draw_image()] for column in columns}
    _put(row, flags.value("input_key") or "input", turns if trains else question)
    if flags.has("label_key"):
        _put(row, flags.value("label_key") or "label", str(a + b))
    _put(
        row,
        flags.value("metadata_key") or "metadata",
        {"rm_type": "math"} if not flags.has("rm_type") else {},
    )
    return row


def _put(row: dict[str, object], key: str, value: object) -> None:
    *folders, last = key.split(".")
    for name in folders:
        inner = row.setdefault(name, {})
        assert isinstance(inner, dict)
        row = inner
    row.setdefault(last, value)
