"""The file with the data position of a rollout: a JSON object with the checksum of its values.

Without the checksum, a changed bit could skip or repeat prompts without an error.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from slime.system.disk_space import DiskSpaceGuard

logger = logging.getLogger(__name__)
VERSION = 2
"""Version of the file. Version 1 has no checksum and is otherwise the same."""
_SUM = "sha256"


def state_path(root: str, rollout_id: int) -> Path:
    return Path(root) / "rollout" / f"data_state_{rollout_id}.json"


def write_state(path: Path, state: Mapping[str, object]) -> None:
    """Writes a state of plain values in one atomic step. Raises ValueError for other values, and for a full disk."""
    text = json.dumps({**state, _SUM: _digest(state)}, default=_refuse)
    scratch = path.with_suffix(f".{os.getpid()}.tmp")
    with DiskSpaceGuard("--save", path.parent, "the data position"):
        path.parent.mkdir(parents=True, exist_ok=True)
        with scratch.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(scratch, path)


def read_state(path: Path) -> dict[str, Any]:
    """Returns the saved state. Raises ValueError for a damaged file."""
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
        problem = None if isinstance(state, dict) else f"it is {type(state).__name__}"
    except (ValueError, RecursionError) as error:
        state, problem = {}, str(error)
    if problem is None and state.get("version") == 1 and _SUM not in state:
        logger.warning("%s has no checksum: an earlier version saved it, so it is not verified", path)
    elif problem is None and state.get("version") == VERSION and _digest(state) != state.get(_SUM):
        problem = f"its checksum is {_digest(state)} instead of {state.get(_SUM)}"
    if problem is not None:
        raise ValueError(
            f"{path} must be the data position as it was saved, got a damaged file ({problem}); resume an older "
            "checkpoint with --ckpt-step, or start the data anew with --start-rollout-id 0 and another --save"
        )
    found: dict[str, Any] = state
    return found


def _digest(state: Mapping[str, object]) -> str:
    """Returns the checksum of a state, computed from the values after a round trip through JSON."""
    values = json.loads(json.dumps({name: state[name] for name in state if name != _SUM}, default=_refuse))
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def _refuse(value: object) -> NoReturn:
    raise ValueError(
        "a buffered sample must hold plain values (numbers, strings, lists, dicts), got "
        f"{type(value).__name__}; "
        "convert it in the generate function, or keep it out of --partial-rollout"
    )
