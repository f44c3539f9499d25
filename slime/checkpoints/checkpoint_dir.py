"""Finds the directories that hold weights, and their kind. Reads file names only and loads no weights.

A Megatron checkpoint is DIR/iter_0000010/, and DIR/latest_checkpointed_iteration.txt names the latest one. If that file
contains "release", slime's converter wrote weights to DIR/release/. A Hugging Face directory has safetensors files and
config.json. The check of flags uses this module, so it imports neither torch nor Megatron.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from slime.records.errors import FlagError

if TYPE_CHECKING:
    from slime.config.schema import Config

LATEST = "latest_checkpointed_iteration.txt"
RELEASE = "release"
INDEX = ".metadata"  # maps the tensors of a torch_dist checkpoint to its files
COMPLETE = "metadata.json"  # Megatron writes it last
HF_INDEX = "model.safetensors.index.json"
HF_SINGLE = "model.safetensors"


def iteration_path(directory: Path, iteration: int) -> Path:
    return directory / f"iter_{iteration:07d}"


def hidden(path: Path, suffix: str) -> Path:
    """Returns the path that `path` has while it is being written ("partial") or replaced ("old")."""
    return path.with_name(f".{path.name}.{suffix}")


def existing(directory: Path, iteration: int) -> Path:
    """Returns the path of an iteration: its normal path, or the "old" path if a second save stopped between two
    renames. If neither exists, it returns the normal path."""
    path = iteration_path(directory, iteration)
    old = hidden(path, "old")
    return old if old.exists() and not path.exists() else path


def latest(directory: str | Path) -> int | None:
    """Returns the iteration of the newest complete checkpoint under `directory`. Returns None without one, and if there
    is only a release.

    Raises ValueError if the latest checkpoint that the directory names is missing or incomplete.
    """
    record = Path(directory) / LATEST
    if not record.is_file():
        return None
    text = record.read_text(encoding="utf-8").strip()
    if text == RELEASE:
        return None
    if not text.isdigit():
        raise ValueError(
            f"{record} must hold an iteration number or {RELEASE!r}, got {text!r}; write the number of a folder iter_* "
            "beside it"
        )
    path = existing(Path(directory), int(text))
    if not path.exists():
        raise ValueError(f"{record} must name a complete checkpoint, got {text} but there is no {path.name}")
    if not (path / COMPLETE).is_file():
        raise ValueError(f"{record} must name a complete checkpoint, got {text} but {path} is not one")
    return int(text)


def released(directory: str | Path) -> Path | None:
    """Returns DIR/release if DIR holds weights that slime or Megatron converted, otherwise None. Checks only that the
    index exists.

    Raises ValueError if the directory names a release, but the weights are missing or have another format.
    """
    record = Path(directory) / LATEST
    if not record.is_file() or record.read_text(encoding="utf-8").strip() != RELEASE:
        return None
    path = record.with_name(RELEASE)
    if not (path / INDEX).is_file():
        raise FlagError(
            record,
            f"be next to {RELEASE}/ in the format torch_dist",
            f"no {path / INDEX}",
            "convert the model again, or write it with `vime export --to torch_dist`",
        )
    return path


def resumed_iteration(config: Config) -> int | None:
    """Returns the iteration of --load from which a run resumes: --ckpt-step, or the newest. None means a new run."""
    return None if config.checkpoint.finetune else _iteration(config)


def _iteration(config: Config) -> int | None:
    if config.checkpoint.load is None or config.checkpoint.ckpt_step is not None:
        return config.checkpoint.ckpt_step
    return latest(config.checkpoint.load)


def saves_where_it_loads(config: Config) -> bool:
    """Returns whether a second start of the command resumes from the checkpoints that the first start has saved."""
    load, save = config.checkpoint.load, config.checkpoint.save
    return load is not None and save is not None and Path(load).resolve() == Path(save).resolve()


def first_rollout(config: Config, iteration: int) -> int:
    """Returns the first rollout of a run that resumes from checkpoint `iteration`.

    --start-rollout-id is for the first start of a command. If the command resumes from a checkpoint that it saved after
    that rollout, the run continues from there. Otherwise a queue would repeat the same rollouts forever.
    """
    first = config.data.start_rollout_id
    if first is None or (saves_where_it_loads(config) and iteration >= first):
        return iteration + 1
    return first


def holds_hf_weights(directory: str | Path) -> bool:
    """Returns whether the directory has safetensors files to load: one file, or several files with their index."""
    return any((Path(directory) / name).is_file() for name in (HF_SINGLE, HF_INDEX))


def is_hf_directory(directory: str | Path) -> bool:
    """Returns whether the directory's config.json describes a model. A run directory has a config.json of another
    kind."""
    try:
        content = json.loads((Path(directory) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(content, dict) and "model_type" in content


def require_no_model(flag: str, folder: str | Path) -> None:
    """Raises ValueError if the folder holds a Hugging Face model."""
    if is_hf_directory(folder) or holds_hf_weights(folder):
        raise FlagError(
            flag,
            "be a folder without a model",
            f"{folder}, which holds one",
            "name another folder, or a new one",
        )


def start_directory(config: Config) -> str:
    """Returns the directory of the first weights of a new run. It is --load if that is an HF directory, holds converted
    weights or, with --finetune, has a checkpoint. Otherwise it is --ref-load, then --hf-checkpoint. If --load equals
    --save, --load is empty at the first start."""
    load, finetune = config.checkpoint.load, config.checkpoint.finetune
    if load and (is_hf_directory(load) or released(load) or (finetune and _iteration(config) is not None)):
        return load
    return config.checkpoint.ref_load or config.rollout.hf_checkpoint


def start_iteration(config: Config) -> int | None:
    """Returns the iteration of `start_directory` to load: --ckpt-step or --ref-ckpt-step. None means the newest."""
    checkpoint, start = config.checkpoint, start_directory(config)
    if start == checkpoint.load:
        return checkpoint.ckpt_step
    return checkpoint.ref_ckpt_step if start == checkpoint.ref_load else None
