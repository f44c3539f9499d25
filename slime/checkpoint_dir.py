"""Which directories hold weights, and of which kind: told from their files, nothing is loaded.

A Megatron checkpoint is DIR/iter_0000010/, named as the latest by DIR/latest_checkpointed_iteration.txt; a Hugging Face
directory has safetensors files beside its config.json. Imports neither torch nor Megatron: flags are checked with it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

LATEST = "latest_checkpointed_iteration.txt"
COMPLETE = "metadata.json"  # Megatron writes it last
HF_INDEX = "model.safetensors.index.json"
HF_SINGLE = "model.safetensors"


def iteration_path(directory: Path, iteration: int) -> Path:
    return directory / f"iter_{iteration:07d}"


def hidden(path: Path, suffix: str) -> Path:
    """Where `path` is while it is being written ("partial") or replaced ("old")."""
    return path.with_name(f".{path.name}.{suffix}")


def existing(directory: Path, iteration: int) -> Path:
    """Where an iteration lies: in its place, or still aside if a second save of it was cut off between two renames."""
    path = iteration_path(directory, iteration)
    return path if path.exists() else hidden(path, "old")


def latest(directory: str | Path) -> int | None:
    """Iteration of the newest complete checkpoint under `directory`, None when it holds none.

    ValueError when the directory names a latest checkpoint that is not there or not complete.
    """
    record = Path(directory) / LATEST
    if not record.is_file():
        return None
    text = record.read_text().strip()
    if not text.isdigit():
        raise ValueError(
            f"{record} must hold an iteration number, got {text!r}; what slime or Megatron converted is not read, a "
            "Hugging Face directory is"
        )
    path = existing(Path(directory), int(text))
    if not (path / COMPLETE).is_file():
        raise ValueError(f"{record} must name a complete checkpoint, got {text} but {path} is not one")
    return int(text)


def holds_hf_weights(directory: str | Path) -> bool:
    """Whether there are safetensors files to load, one or several with their index."""
    return any((Path(directory) / name).is_file() for name in (HF_SINGLE, HF_INDEX))


def is_hf_directory(directory: str | Path) -> bool:
    """Whether its config.json is that of a model; a run directory has one, too, which is not."""
    try:
        content = json.loads((Path(directory) / "config.json").read_text())
    except (OSError, ValueError):
        return False
    return isinstance(content, dict) and "model_type" in content


def start_directory(config: Any) -> str:
    """Where a run that resumes nothing takes its weights from: --load when that is an HF directory (when it is also
    --save, the first start finds it empty), else --ref-load, else --hf-checkpoint.
    """
    if config.load and is_hf_directory(config.load):
        return config.load
    return config.ref_load or config.hf_checkpoint
