"""Which older checkpoints of a folder are removed (--max-actor-ckpt-to-keep). Imports neither torch nor Megatron."""

from __future__ import annotations

import re
import shutil
from collections.abc import Collection
from pathlib import Path

from slime.checkpoints.checkpoint_dir import (
    existing,
    hidden,
    iteration_path,
    latest,
    saves_where_it_loads,
)
from slime.checkpoints.checkpoint_files import iterations
from slime.config import Config


def after_save(c: Config, directory: str | Path) -> None:
    """Remove what the flags do not keep, once a new checkpoint in `directory` is the latest."""
    flags = c.checkpoint
    if flags.max_actor_ckpt_to_keep is not None:
        prune(Path(directory), flags.max_actor_ckpt_to_keep, named(c))
    if flags.max_actor_ckpt_to_keep is not None or flags.exit_signal_handler:
        drop_positions(Path(directory))


def named(c: Config) -> set[int]:
    """The iterations of --save that another flag of this run names: a second start of the command needs them."""
    flags = c.checkpoint
    steps = {flags.ckpt_step} if saves_where_it_loads(c) else set()
    if flags.save and flags.ref_load and Path(flags.ref_load).resolve() == Path(flags.save).resolve():
        steps.add(flags.ref_ckpt_step)
    return {step for step in steps if step is not None}


def prune(directory: Path, keep: int, spared: Collection[int]) -> None:
    """Remove the complete iterations of `directory` but for the last `keep` up to the latest, and `spared`.

    Later iterations than the latest are those of an earlier run, which the present run replaces. An iteration leaves
    its name before its files go, so whatever is interrupted, no name has half of its files.
    """
    assert keep > 0
    newest = latest(directory)
    assert newest is not None
    for number in [i for i in iterations(directory) if i <= newest][:-keep]:
        if number not in spared:
            leaving = hidden(iteration_path(directory, number), "partial")
            existing(directory, number).rename(leaving)
            shutil.rmtree(leaving)


def drop_positions(directory: Path) -> None:
    """Remove the data positions of rollouts before the latest iteration that have no checkpoint."""
    newest, kept = latest(directory), set(iterations(directory))
    for file in (directory / "rollout").glob("data_state_*.json"):
        number = re.fullmatch(r"data_state_(\d+)\.json", file.name)
        if number and newest is not None and int(number[1]) < newest and int(number[1]) not in kept:
            file.unlink()
