"""Sends metrics to `metrics.jsonl` always, and to the trackers of TRACKERS on request. A tracker is one file and a line
here.

A tracker shows slime's metric names unchanged, but characters that it refuses become `_` (`record.Names`).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, SupportsFloat

from slime.system.imports import is_installed
from slime.tracking.metrics import RESERVED, STEP_KEYS, as_floats, as_step_key
from slime.tracking.trackers.jsonl import (
    METRICS_FILE,
    JsonlTracker,
    MetricLines,
    metric_record,
    next_train_step,
)
from slime.tracking.trackers.mlflow import MLFLOW
from slime.tracking.trackers.prometheus import PROMETHEUS
from slime.tracking.trackers.record import State, Tracker, TrackerKind
from slime.tracking.trackers.swanlab import SWANLAB
from slime.tracking.trackers.tensorboard import TENSORBOARD
from slime.tracking.trackers.trackio import TRACKIO
from slime.tracking.trackers.wandb import WANDB

if TYPE_CHECKING:
    from slime.config.schema import Config

TRACKERS: tuple[TrackerKind, ...] = (TENSORBOARD, WANDB, MLFLOW, SWANLAB, TRACKIO, PROMETHEUS)


class Trackers:
    """The trackers of a run. The loop calls one `log`, which checks names and numbers once."""

    def __init__(self, trackers: list[Tracker], start: tuple[int, int] = (0, 0)) -> None:
        """Stores the trackers. `start` has the first rollout that is logged, and the number of its first optimizer
        step."""
        self._trackers, self._start = trackers, start

    def first_step(self, rollout_id: int, steps: int) -> int:
        """Returns the number of the first optimizer step of a rollout, in a run with `steps` per rollout."""
        rollout, step = self._start
        return step + (rollout_id - rollout) * steps

    def log(self, metrics: Mapping[str, SupportsFloat], step: int, step_key: str) -> None:
        """Sends `metrics` to every tracker. Raises ValueError for an unknown step key or a value that is not a
        number."""
        key, numbers = as_step_key(step_key), as_floats(metrics)
        for tracker in self._trackers:
            tracker.log(numbers, int(step), key)

    def close(self, state: State = "finished") -> None:
        """Closes the trackers with the final state of the run, which some trackers show."""
        for tracker in self._trackers:
            tracker.close(state)


def check_trackers(config: Config) -> None:
    """Raises ValueError for a tracker that would not start on this host, before the models are loaded."""
    for kind in TRACKERS:
        if kind.check is not None and kind.asked(config.logging):
            kind.check(config)


def make_trackers(config: Config, run_dir: Path, resume_step: int) -> Trackers:
    """Returns the trackers that `config` selects, ready to log from rollout `resume_step` on (0 for a new run).

    Records that an earlier process logged in this run directory for rollout `resume_step` and later are removed,
    because they will be logged again. Optimizer steps continue from the last earlier one, because a run may resume with
    another number of steps per rollout. In a new run directory, they begin at resume_step * --num-steps-per-rollout.
    """
    run_dir = Path(run_dir)
    resume = dict.fromkeys(STEP_KEYS, resume_step)
    logged = next_train_step(run_dir / METRICS_FILE, resume_step)
    resume["train/step"] = resume_step * config.data.num_steps_per_rollout if logged is None else logged
    trackers: list[Tracker] = [JsonlTracker(run_dir / METRICS_FILE, resume)]
    for kind in TRACKERS:
        if kind.asked(config.logging) and not (kind.optional and not is_installed(kind.module)):
            trackers.append(kind.make(config, run_dir, resume))
    return Trackers(trackers, (resume_step, resume["train/step"]))


__all__ = [
    "METRICS_FILE",
    "RESERVED",
    "TRACKERS",
    "JsonlTracker",
    "MetricLines",
    "Tracker",
    "TrackerKind",
    "Trackers",
    "check_trackers",
    "make_trackers",
    "metric_record",
]
