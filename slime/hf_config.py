"""config.json of a Hugging Face checkpoint, read in one place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read_hf_config(checkpoint: str | Path) -> dict[str, Any]:
    """config.json of a Hugging Face checkpoint directory; ValueError when it is missing or no JSON object."""
    path = Path(checkpoint) / "config.json"
    if not path.is_file():
        raise ValueError(
            f"--hf-checkpoint must be a directory with a config.json, got {checkpoint}; check the path"
        )
    try:
        content = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"--hf-checkpoint must hold a valid config.json, got {path}: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(
            f"--hf-checkpoint must hold a JSON object in config.json, got {type(content).__name__}"
        )
    return content
