"""Reports that an engine cannot use a delta: the engine appends a line to a file of the update that all hosts see.

The report is not an error of the call. The engine's update continues, and the driver makes the trainer send the whole
set within the same update.
"""

from __future__ import annotations

import uuid
from pathlib import Path

from slime.protocols import WeightUpdate

_STEM = "refused-"


def new_file(directory: Path) -> Path:
    """Creates the empty file of a new update. Removes the files of older updates."""
    for old in directory.glob(f"{_STEM}*"):
        old.unlink(missing_ok=True)
    path = directory / f"{_STEM}{uuid.uuid4().hex}"
    path.touch()  # a host of a network disk would cache for a long time that the file does not exist
    return path


def refuse(path: str, reason: str) -> None:
    """Appends the reason, in one line."""
    with open(path, "a", encoding="utf-8") as file:
        file.write(" ".join(reason.split()) + "\n")


def refusals(part: WeightUpdate) -> list[str]:
    """Returns the reasons that engines have reported for a delta so far."""
    if part.weights.kind != "delta":
        return []
    # The file is opened each time, because only then does a network disk query its server.
    return Path(part.weights.settings["refusals"]).read_text(encoding="utf-8").splitlines()
