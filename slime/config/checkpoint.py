"""Flags of the checkpoint section: what a run loads at its start and saves later."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from slime.checkpoint_dir import (
    COMPLETE,
    HF_INDEX,
    HF_SINGLE,
    LATEST,
    holds_hf_weights,
    latest,
    start_directory,
)
from slime.config.fields import flag
from slime.config.problems import given
from slime.config.ranges import COUNT

if TYPE_CHECKING:
    from slime.config.schema import Config


@dataclass(frozen=True)
class CheckpointConfig:
    """Directories are Megatron distributed checkpoints, unless the help text names another kind."""

    load: str | None = flag(None, "folder of checkpoints to resume from; if it holds none, a new run starts")
    save: str | None = flag(None, "folder for checkpoints")
    save_interval: int | None = flag(
        None, "number of rollouts between two checkpoints; the last rollout is always saved", range=COUNT
    )
    no_save_optim: bool = flag(
        False, "do not save the optimizer; such a checkpoint cannot be resumed exactly"
    )
    save_hf: str | None = flag(
        None, "folder for Hugging Face checkpoints in addition; {rollout_id} in its name is replaced"
    )
    ref_load: str | None = flag(None, "weights of the reference model (default: --hf-checkpoint)")


def check_directories(c: Config) -> None:
    """The directories that the trainer reads at its start must hold readable weights. --load and --save must be
    folders.

    --load may be empty or missing: then a new run starts. Another check covers --hf-checkpoint.
    """
    for flag_name, path in (("--load", c.checkpoint.load), ("--save", c.checkpoint.save)):
        if path and Path(path).exists() and not Path(path).is_dir():
            raise ValueError(
                f"{flag_name} must name a directory, got the file {path}; name the folder of checkpoints"
            )
    if c.debug.debug_rollout_only:
        return
    resumes = c.checkpoint.load is not None and _latest("--load", c.checkpoint.load) is not None
    if c.checkpoint.load and not resumes and (Path(c.checkpoint.load) / COMPLETE).is_file():
        folder = Path(c.checkpoint.load).absolute().parent
        raise ValueError(
            f"--load must name the folder of all iterations, got one of them, {c.checkpoint.load}; use {folder}"
        )
    start = start_directory(c)
    if not resumes and start == c.checkpoint.load and not holds_hf_weights(start):
        raise ValueError(
            f"--load must hold {HF_SINGLE} or {HF_INDEX} beside its config.json, got neither in {start}; copy them"
        )
    read = c.needs_reference or (not resumes and start == c.checkpoint.ref_load)
    if read and Path(reference := given(c.checkpoint.ref_load)) != Path(given(c.rollout.hf_checkpoint)):
        _check_reference(reference)


def _check_reference(path: str) -> None:
    if _latest("--ref-load", path) is None and not holds_hf_weights(path):
        got = "which holds neither" if Path(path).is_dir() else "which is no directory"
        raise ValueError(
            f"--ref-load must name a Hugging Face directory with {HF_SINGLE} or {HF_INDEX}, or a folder with the "
            f"{LATEST} that --save writes, got {path}, {got}; leave it out to use --hf-checkpoint"
        )


def _latest(flag_name: str, path: str) -> int | None:
    try:
        return latest(path)
    except ValueError as error:
        raise ValueError(
            f"{flag_name} must hold a checkpoint that can be read, got {path}: {error}"
        ) from error
