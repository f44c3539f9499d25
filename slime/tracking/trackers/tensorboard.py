"""Implements --use-tensorboard. Files go to `run_dir`/tensorboard[/--tb-project-name][/--tb-experiment-name]."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from slime.tracking.metrics import STEP_KEYS, StepKey
from slime.tracking.trackers.record import State, TrackerKind

if TYPE_CHECKING:
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    from slime.config.schema import Config


class TensorBoardTracker:
    """Writes scalars under their own names, in one sub-directory per step unit (rollout, train, eval).

    The directories are separate because TensorBoard removes replayed steps per directory and by one number, but a
    resumed run has a different first step in each unit.
    """

    def __init__(self, log_dir: Path, resume: Mapping[str, int]) -> None:
        self._log_dir = Path(log_dir)
        self._resume = dict(resume)
        self._writers: dict[str, EventFileWriter] = {}
        for step_key in STEP_KEYS:
            if self._directory(
                step_key
            ).is_dir():  # remove steps that will be replayed, even if none is logged again
                self._writer(step_key)

    def log(self, metrics: Mapping[str, float], step: int, step_key: StepKey) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        writer = self._writer(step_key)
        writer.add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))
        writer.flush()

    def close(self, state: State) -> None:
        for writer in self._writers.values():
            writer.close()

    def _directory(self, step_key: str) -> Path:
        return self._log_dir / step_key.split("/")[0]

    def _writer(self, step_key: str) -> EventFileWriter:
        """Returns a writer of TensorBoard. torch's writer would import torch, which the driver does not have."""
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        if step_key not in self._writers:
            directory = self._directory(step_key)
            again = self._resume.get(step_key) if directory.is_dir() else None
            writer = self._writers[step_key] = EventFileWriter(str(directory))
            if again is not None:  # TensorBoard then drops the values of earlier files from this step on
                log = SessionLog(status=SessionLog.START)
                writer.add_event(Event(wall_time=time.time(), step=again, session_log=log))
        return self._writers[step_key]


def _make(config: Config, run_dir: Path, resume: Mapping[str, int]) -> TensorBoardTracker:
    parts = [part for part in (config.logging.tb_project_name, config.logging.tb_experiment_name) if part]
    return TensorBoardTracker(run_dir.joinpath("tensorboard", *parts), resume)


TENSORBOARD = TrackerKind(
    "--use-tensorboard", lambda flags: flags.use_tensorboard, "tensorboard", "tensorboard", _make
)
