"""How an engine says that it cannot use a delta: it adds a line to a file of the update that all hosts see.

It is no error of the call. The engine's update goes on, and the driver has the trainer send the whole set within it.
"""

from __future__ import annotations

import uuid
from pathlib import Path

from slime.protocols import WeightUpdate

_STEM = "refused-"


def new_file(directory: Path) -> Path:
    """The empty file of a new update. Those of older updates are removed."""
    for old in directory.glob(f"{_STEM}*"):
        old.unlink(missing_ok=True)
    path = directory / f"{_STEM}{uuid.uuid4().hex}"
    path.touch()  # a host of a network disk would remember for a long time that the file does not exist
    return path


def refuse(path: str, reason: str) -> None:
    """Say why, in one line."""
    with open(path, "a", encoding="utf-8") as file:
        file.write(" ".join(reason.split()) + "\n")


def refusals(part: WeightUpdate) -> list[str]:
    """What engines said of a delta so far."""
    if part.weights.kind != "delta":
        return []
    # The file is opened each time: only then does a network disk ask its server.
    return Path(part.weights.settings["refusals"]).read_text(encoding="utf-8").splitlines()
