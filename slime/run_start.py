"""Where a run starts, in one line for people, and the check that a new run replaces no earlier run's results.

Looks at names of files only; the trainer reads them.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from slime.checkpoint_dir import LATEST, latest, released, resumed_iteration, start_directory, start_iteration
from slime.checkpoint_files import iterations
from slime.tracking.trackers import METRICS_FILE

if TYPE_CHECKING:
    from slime.config.schema import Config

_LISTED = 4


def start_line(config: Config) -> str:
    """What the run continues from, or that it is a new one and where its weights come from."""
    if config.debug.debug_rollout_only:
        return f"new run that only generates, with weights from {config.rollout.hf_checkpoint}"
    iteration, first = resumed_iteration(config), config.data.start_rollout_id
    if iteration is None:
        step = start_iteration(config)
        line = f"new run with weights from {start_directory(config)}{'' if step is None else f', iteration {step}'}"
        return (
            f"{line}; --load {config.checkpoint.load} has no checkpoint yet"
            if _queued_again(config)
            else line
        )
    line = f"resumes after rollout {iteration} of {config.checkpoint.load}"
    if first is not None and first != iteration + 1:
        line += f", and counts rollouts from --start-rollout-id {first}: a second start would do them again"
    return line


def finished(config: Config) -> bool:
    """Whether the checkpoint that the run resumes from is the one after its last rollout."""
    rollouts, first = config.data.num_rollout, config.data.start_rollout_id
    if (
        config.debug.debug_rollout_only
        or not rollouts  # --num-rollout 0 evaluates the checkpoint
        or (iteration := resumed_iteration(config)) is None
    ):
        return False
    return (iteration + 1 if first is None else first) >= rollouts


def check_start(c: Config) -> None:
    """ValueError if --load holds checkpoints and does not say which is the newest, or if the run would replace
    checkpoints or metrics of another one. --overwrite allows the second.

    A command with the same --load and --save is meant to be started again. Before its first checkpoint it begins anew.
    """
    try:
        resumed_iteration(c)
    except ValueError:
        return  # the check of --load says so
    _require_record(c)
    if c.checkpoint.overwrite:
        return
    iteration, save = resumed_iteration(c), c.checkpoint.save
    continues = iteration is not None and _queued_again(c)
    if (
        save is not None
        and not continues
        and not c.debug.debug_rollout_only
        and (saved := iterations(Path(save)))
    ):
        raise ValueError(
            f"--save must be a folder without checkpoints for a run that does not resume them, got {save} with "
            f"{_listed(saved)}; resume with --load {save}, name another folder, or give --overwrite"
        )
    metrics = Path(c.logging.run_dir or "") / METRICS_FILE
    if iteration is None and not _queued_again(c) and metrics.is_file() and metrics.stat().st_size:
        raise ValueError(
            f"--run-dir must be a folder without metrics for a new run, got {metrics}; resume with --load (and "
            "--ckpt-step), name another folder, or give --overwrite"
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
        raise ValueError(
            f"--load must have a {LATEST} that says which checkpoint is the newest, got {load} with {_listed(saved)} "
            f"and none; take one with --ckpt-step {saved[-1]}"
        )


def _queued_again(c: Config) -> bool:
    """Whether the command resumes from what it saves."""
    load, save = c.checkpoint.load, c.checkpoint.save
    return load is not None and save is not None and Path(load).resolve() == Path(save).resolve()


def _listed(saved: list[int]) -> str:
    shown = ", ".join(map(str, saved[-_LISTED:]))
    return f"iteration{'s' if len(saved) > 1 else ''} {'..., ' if len(saved) > _LISTED else ''}{shown}"
