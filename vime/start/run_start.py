"""Describes a run's start in one line for people, and checks that a new run replaces no results of an earlier run.

This module looks only at file names. The trainer reads the files.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from slime.checkpoints.checkpoint_dir import (
    LATEST,
    first_rollout,
    latest,
    released,
    resumed_iteration,
    saves_where_it_loads,
    start_directory,
    start_iteration,
)
from slime.checkpoints.checkpoint_files import iterations
from slime.records.errors import FlagError
from slime.roles import get_roles
from slime.tracking.journal import read_events
from slime.tracking.kinds import EVENTS_FILE
from slime.tracking.run_files import is_there
from slime.tracking.trackers import METRICS_FILE

if TYPE_CHECKING:
    from slime.config.schema import Config

_LISTED = 4


def start_line(config: Config) -> str:
    """Returns the line about the run's start: the checkpoint that the run resumes, or the weights of a new run."""
    if config.debug.debug_rollout_only:
        return f"new run that only generates, with weights from {config.rollout.hf_checkpoint}"
    iteration, first = resumed_iteration(config), config.data.start_rollout_id
    if iteration is None:
        step = start_iteration(config)
        line = f"new run with weights from {start_directory(config)}{'' if step is None else f', iteration {step}'}"
        return (
            f"{line}; --load {config.checkpoint.load} has no checkpoint yet"
            if saves_where_it_loads(config)
            else line
        )
    line = f"resumes after rollout {iteration} of {config.checkpoint.load}"
    again = "a second start of this command would do the same rollouts again"
    if first is not None and first_rollout(config, iteration) != iteration + 1:
        return f"{line}, and counts rollouts from --start-rollout-id {first}: {again}"
    if first is not None and first <= iteration:
        return f"{line}; --start-rollout-id {first} was for its first start (with another --save it counts from there)"
    if config.checkpoint.ckpt_step is not None and saves_where_it_loads(config):
        return f"{line}, as set by --ckpt-step: {again}"
    return line


def finished(config: Config) -> bool:
    """Returns whether the run resumes after its last rollout, so that no rollout is left."""
    rollouts = config.data.num_rollout
    if (
        config.debug.debug_rollout_only
        or not rollouts  # --num-rollout 0 evaluates the checkpoint
        or (iteration := resumed_iteration(config)) is None
    ):
        return False
    return first_rollout(config, iteration) >= rollouts


def resume_flags(c: Config) -> list[str] | None:
    """Returns the flags that a second command adds to this run's flags to resume from the newest checkpoint in --save.

    Returns None if --save has no checkpoint, or if the flags start each run anew.
    """
    save, step = c.checkpoint.save, c.checkpoint.ckpt_step
    newest = None if save is None or c.debug.debug_rollout_only else latest(save)
    if save is None or newest is None or c.checkpoint.finetune:
        return None
    added = [] if saves_where_it_loads(c) else ["--load", save]
    return added if step is None else [*added, "--ckpt-step", str(newest)]


def check_start(c: Config) -> None:
    """Raises ValueError if --load has checkpoints without a record of the newest, or if the run would replace another
    run's checkpoints or metrics. --overwrite allows the run to replace them.

    A command with the same folder for --load and --save may be started again. Without a checkpoint, it starts anew.
    """
    try:
        resumed_iteration(c)
    except ValueError:
        return  # The check of --load raises this error.
    _require_record(c)
    if c.checkpoint.overwrite:
        return
    iteration = resumed_iteration(c)
    continues = iteration is not None and saves_where_it_loads(c)
    for role in () if continues or c.debug.debug_rollout_only else reversed(get_roles(c)):
        save = role.saves_to(c)
        if save is not None and (saved := iterations(Path(save))):
            raise FlagError(
                role.save_flag,
                "be a folder without checkpoints for a run that does not resume them",
                f"{save} with {_listed(saved)}",
                f"resume with --load {c.checkpoint.save}, name another folder, or give --overwrite",
            )
    if iteration is not None:
        _require_session(c)
    metrics = Path(c.logging.run_dir) / METRICS_FILE
    if iteration is None and not saves_where_it_loads(c) and metrics.is_file() and metrics.stat().st_size:
        raise FlagError(
            "--run-dir",
            "be a folder without metrics for a new run",
            metrics,
            "resume with --load (and --ckpt-step), name another folder, or give --overwrite",
        )


def _require_session(c: Config) -> None:
    """Raises ValueError if the run resumes in the run directory of a run with another --rollout-session-id."""
    run_dir = Path(c.logging.run_dir)
    if not is_there(run_dir, EVENTS_FILE):
        return
    named = [event.get("session_id") for event in read_events(run_dir, ("run",))]
    before, now = named[-1] if named else None, c.fault_tolerance.rollout_session_id
    if before is not None and now != before:
        raise FlagError(
            "--rollout-session-id",
            f"be {before!r}, the name of the run that it resumes in --run-dir",
            repr(now),
            "give that name, or another --run-dir for another run",
        )


def _require_record(c: Config) -> None:
    load = c.checkpoint.load
    if (
        load is None
        or c.checkpoint.ckpt_step is not None
        or latest(load) is not None
        or released(load) is not None
    ):
        return
    if saved := iterations(Path(load)):
        raise FlagError(
            "--load",
            f"have a {LATEST} with the number of the newest checkpoint",
            f"{load} with {_listed(saved)} and none",
            f"take one with --ckpt-step {saved[-1]}",
        )


def _listed(saved: list[int]) -> str:
    shown = ", ".join(map(str, saved[-_LISTED:]))
    return f"iteration{'s' if len(saved) > 1 else ''} {'..., ' if len(saved) > _LISTED else ''}{shown}"
