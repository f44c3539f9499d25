"""Removes older checkpoints of a folder (--max-actor-ckpt-to-keep). Imports neither torch nor Megatron."""

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
    """Removes the files that the flags do not keep, after a new checkpoint in `directory` is the latest."""
    flags = c.checkpoint
    if flags.max_actor_ckpt_to_keep is not None:
        prune(Path(directory), flags.max_actor_ckpt_to_keep, named(c))
    if flags.max_actor_ckpt_to_keep is not None or flags.exit_signal_handler:
        drop_positions(Path(directory))


def named(c: Config) -> set[int]:
    """Returns the iterations of --save that another flag of this run names. A second start of the command needs these
    iterations."""
    flags = c.checkpoint
    steps = {flags.ckpt_step} if saves_where_it_loads(c) else set()
    if flags.save and flags.ref_load and Path(flags.ref_load).resolve() == Path(flags.save).resolve():
        steps.add(flags.ref_ckpt_step)
    return {step for step in steps if step is not None}


def prune(directory: Path, keep: int, spared: Collection[int]) -> None:
    """Removes the complete iterations of `directory` except `spared` and the last `keep` iterations up to the latest.

    Iterations after the latest belong to an earlier run, which the present run replaces. An iteration is renamed before
    its files are deleted, so after an interruption no iteration has only half of its files under its name.
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
    """Removes the data positions of rollouts before the latest iteration that have no checkpoint."""
    newest, kept = latest(directory), set(iterations(directory))
    for file in (directory / "rollout").glob("data_state_*.json"):
        number = re.fullmatch(r"data_state_(\d+)\.json", file.name)
        if number and newest is not None and int(number[1]) < newest and int(number[1]) not in kept:
            file.unlink()
