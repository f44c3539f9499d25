"""A TensorBoard writer for plug-ins, under slime's name.

`slime.utils.logging_utils.log` sends numbers to all trackers of a run. This class writes numbers to separate files,
also in a process without a run.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import SupportsFloat

from slime.config.schema import read_section
from slime.config.sections.logging import LoggingConfig
from slime.hooks import SingletonMeta

FOLDER = "TENSORBOARD_DIR"


class _TensorboardAdapter(metaclass=SingletonMeta):
    """One writer per process: `_TensorboardAdapter(args).log({"loss": 0.1}, step=1)`.

    The files go to the folder of TENSORBOARD_DIR, or else to tensorboard_log/--tb-project-name/--tb-experiment-name,
    whose last part is the time by default. Raises ValueError without --use-tensorboard, without a folder, and if the
    package tensorboard is missing.
    """

    def __init__(self, run_flags: object) -> None:
        flags = read_section(LoggingConfig, run_flags)
        if not flags.use_tensorboard:
            raise ValueError("--use-tensorboard must be set for a TensorBoard writer, got none; add the flag")
        folder = os.environ.get(FOLDER)
        if not folder and not flags.tb_project_name:
            raise ValueError(
                f"--tb-project-name or {FOLDER} must be set for a TensorBoard writer, got neither; set one"
            )
        try:
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        except ModuleNotFoundError as error:
            raise ValueError(
                "a TensorBoard writer must have the package tensorboard, got none; run `pip install tensorboard`"
            ) from error
        name = flags.tb_experiment_name or time.strftime("%Y%m%d_%H%M%S")
        self.folder = Path(folder or Path("tensorboard_log") / str(flags.tb_project_name) / name)
        self._writer = EventFileWriter(str(self.folder))

    def log(self, data: Mapping[str, SupportsFloat], step: int) -> None:
        """Writes numbers at a step."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=float(value)) for name, value in data.items()]
        self._writer.add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))
        self._writer.flush()

    def finish(self) -> None:
        """Closes the files."""
        self._writer.close()
