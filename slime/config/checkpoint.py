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
    existing,
    holds_hf_weights,
    latest,
    start_directory,
)
from slime.checkpoint_files import WRITE_LATEST, advice, damaged_size, iterations
from slime.config.fields import flag, spelled
from slime.config.problems import given
from slime.config.ranges import COUNT, COUNT_OR_ZERO

if TYPE_CHECKING:
    from slime.config.schema import Config

_RELEASE = "release"


@dataclass(frozen=True)
class CheckpointConfig:
    """Directories are Megatron distributed checkpoints, unless the help text names another kind."""

    load: str | None = flag(None, "folder of checkpoints to resume from; if it holds none, a new run starts")
    ckpt_step: int | None = flag(
        None,
        "the iteration of --load to resume from (default: the newest); later iterations are replaced as the run saves",
        range=COUNT_OR_ZERO,
    )
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
    finetune: bool = flag(
        False, "start from weights alone; an error where --load holds a checkpoint to resume"
    )
    no_load_optim: bool = flag(False, "as --finetune")
    no_load_rng: bool = flag(False, "as --finetune")
    ref_load: str | None = flag(None, "weights of the reference model (default: --hf-checkpoint)")


def check_directories(c: Config) -> None:
    """The directories that the trainer reads at its start must hold readable weights. --load and --save must be
    folders.

    --load may be empty or missing: then a new run starts. Of the files of a checkpoint, sizes are checked here. The
    trainer checks their content. Another check covers --hf-checkpoint.
    """
    for flag_name, path in (("--load", c.checkpoint.load), ("--save", c.checkpoint.save)):
        if path and Path(path).exists() and not Path(path).is_dir():
            raise ValueError(
                f"{flag_name} must name a directory, got the file {path}; name the folder of checkpoints"
            )
    if c.debug.debug_rollout_only:
        return
    resumes = _resumes(c)
    if resumes and (asked := weights_alone(c)):
        raise ValueError(
            f"{' and '.join(asked)} must be left out where --load has a checkpoint to resume, got {c.checkpoint.load}; "
            "to start from its weights alone, give them as --hf-checkpoint (vime export) and another --load"
        )
    if c.checkpoint.load and not resumes and (Path(c.checkpoint.load) / COMPLETE).is_file():
        folder = Path(c.checkpoint.load).absolute().parent
        raise ValueError(
            f"--load must name the folder of all iterations, got one of them, {c.checkpoint.load}; use {folder}"
        )
    start = start_directory(c)
    read_as_hf = not resumes and start == c.checkpoint.load and not is_converted(start)
    if read_as_hf and not holds_hf_weights(start):
        raise ValueError(
            f"--load must hold {HF_SINGLE} or {HF_INDEX} beside its config.json, got neither in {start}; copy them"
        )
    read = c.needs_reference or (not resumes and start == c.checkpoint.ref_load)
    if read and Path(reference := given(c.checkpoint.ref_load)) != Path(given(c.rollout.hf_checkpoint)):
        _check_reference(reference)


def weights_alone(c: Config) -> list[str]:
    """The given flags that ask for a start from weights alone."""
    return [spelled(name) for name in ("finetune", "no_load_optim", "no_load_rng") if c.value_of(name)]


def is_converted(path: str) -> bool:
    """Whether the folder holds a checkpoint that slime or Megatron converted: `release` in place of an iteration."""
    record = Path(path) / LATEST
    released = record.is_file() and record.read_text().strip() == _RELEASE
    return released and (Path(path) / _RELEASE / ".metadata").is_file()


def _resumes(c: Config) -> bool:
    """Whether the run resumes. ValueError if the iteration to resume from is missing or damaged."""
    load, step = c.checkpoint.load, c.checkpoint.ckpt_step
    if step is None:
        iteration = None if load is None else _latest("--load", load)
    elif load is None:
        raise ValueError(
            f"--load must be given with --ckpt-step, got only --ckpt-step {step}; name the folder"
        )
    elif step not in (saved := iterations(Path(load))):
        listed = ", ".join(map(str, saved)) or "none"
        raise ValueError(f"--ckpt-step must name an iteration in {load}, got {step}; it has {listed}")
    else:
        iteration = step
    if load is None or iteration is None:
        return False
    if found := damaged_size(existing(Path(load), iteration)):
        text = f"{found}; {advice(Path(load), iteration, '--ckpt-step {}')}"
        raise ValueError(text)
    return True


def _check_reference(path: str) -> None:
    if not is_converted(path) and _latest("--ref-load", path) is None and not holds_hf_weights(path):
        got = "which holds neither" if Path(path).is_dir() else "which is no directory"
        raise ValueError(
            f"--ref-load must name a Hugging Face directory with {HF_SINGLE} or {HF_INDEX}, or a folder with the "
            f"{LATEST} that --save writes, got {path}, {got}; leave it out to use --hf-checkpoint"
        )


def _latest(flag_name: str, path: str) -> int | None:
    if is_converted(path):
        return None
    try:
        return latest(path)
    except ValueError as error:
        choose = "--ckpt-step {}" if flag_name == "--load" else WRITE_LATEST
        remedy = advice(Path(path), None, choose)
        raise ValueError(
            f"{flag_name} must hold a checkpoint that can be read, got {path}: {error}; {remedy}"
        ) from error
