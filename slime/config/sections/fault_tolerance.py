"""Flags of the fault-tolerance section. Times are seconds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from slime.config.fields import flag
from slime.config.ranges import COUNT_OR_ZERO, SECONDS, SECONDS_OR_ZERO

RecoverFrom = Literal["disk", "memory"]


@dataclass(frozen=True)
class FaultToleranceConfig:
    """Health of the engines, restarts of the trainer and the rollout manager, and snapshots of the rollouts."""

    rollout_health_check_interval: float = flag(30.0, "seconds between health checks", range=SECONDS)
    rollout_health_check_timeout: float = flag(
        30.0, "maximum seconds until an engine answers a health check", range=SECONDS
    )
    rollout_health_check_first_wait: float = flag(
        0.0, "seconds until the first health check", range=SECONDS_OR_ZERO
    )
    rollout_session_id: str | None = flag(
        None,
        "name of the engines, the data and the journal that survive a trainer; a command that resumes in --run-dir "
        "must give the name of the command before it",
    )
    rollout_cleanup_timeout: float = flag(
        60.0,
        "maximum seconds until the processes of a lost trainer have ended, before new ones start",
        range=SECONDS,
    )
    engine_start_timeout_s: float = flag(600.0, "maximum seconds until an engine is ready", range=SECONDS)
    engine_standby_s: float = flag(
        None,
        "seconds after the last start of an engine until a process imports the engine's modules in advance, so that "
        "the next lost engine of the driver's host is replaced sooner; 0: no such process (default: 60 on CPUs, 0 on "
        "GPUs)",
        range=SECONDS_OR_ZERO,
    )
    rollout_snapshot_s: float = flag(
        60.0,
        "seconds between two snapshots of the unfinished groups in the run directory, from which a run that resumes "
        "takes their tokens; 0 takes none",
        range=SECONDS_OR_ZERO,
    )
    recover_from: str = flag(
        "disk",
        "the checkpoint from which a lost trainer continues: disk: the newest one of --save, or the start of the run, "
        "which costs nothing in a step; memory: a copy of the ranks' state in /dev/shm, made after each step",
        choices=get_args(RecoverFrom),
    )
    max_trainer_restarts: int = flag(
        3,
        "number of times that the trainer may start again before it has trained one more rollout; 0: a lost rank ends "
        "the run",
        range=COUNT_OR_ZERO,
    )
    max_manager_restarts: int = flag(
        3,
        "number of times that the rollout manager may start again before it has made one more rollout; 0: its loss "
        "ends the run; a restart needs the data positions in --save",
        range=COUNT_OR_ZERO,
    )
    failed_samples: str = flag(
        "drop",
        "what becomes of a sample whose reward or generate function passes its deadline, or whose sandbox dies: drop "
        "its group, replace it by another response (after 3 replacements, drop the group), keep the group without it, "
        "or end the run; all are counted",
        choices=("drop", "replace", "keep", "end"),
    )
