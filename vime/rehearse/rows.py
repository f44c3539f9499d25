"""The data of a rehearsal: the first rows of the user's file, or rows made in the format that the flags declare."""

from __future__ import annotations

import json
from pathlib import Path

from slime.data.prompts import read_file
from vime.rehearse.changes import Flags
from vime.rehearse.fitting import SFT

ROWS = 16


def take_rows(flags: Flags, folder: Path, base: Path) -> str:
    """Points --prompt-data to a few rows, and returns where they are from. Paths are relative to `base`."""
    words = flags.values("prompt_data") or []
    if not words:
        return "no --prompt-data"
    path = next((word for word in words if "/" in word or "." in word), words[-1])
    found = (base / path.partition("@[")[0]).exists()
    file = folder / "rows.jsonl"
    if found:
        rows = []
        for row in read_file(str(base / path)):
            rows.append(dict(row))
            if len(rows) == ROWS:
                break
        origin = f"the first {len(rows)} rows of {path}"
    else:
        rows = [make_row(flags, number) for number in range(ROWS)]
        origin = f"{ROWS} rows made in the declared format, because {path} is not on this machine"
    file.write_text("".join(json.dumps(row, default=str) + "\n" for row in rows), encoding="utf-8")
    flags.set("prompt_data", origin, file)
    return origin


def make_row(flags: Flags, number: int) -> dict[str, object]:
    """Returns one row of addition with the columns that the flags name."""
    a, b = 3 * number + 11, 7 * number + 5
    question = f"{a}+{b}="
    turns: list[dict[str, str]] = [{"role": "user", "content": question}]
    trains = flags.value("loss_type") == SFT
    if trains:
        turns.append({"role": "assistant", "content": str(a + b)})
    row: dict[str, object] = {}
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
