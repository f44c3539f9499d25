"""Writes and reads metrics.jsonl, which every run writes.

It has one flat JSON object per `log` call, one per line, so `pandas.read_json(path, lines=True)` returns one column per
metric:

    {"step_key": "train/step", "step": 3, "time": 1767225600.0, "train/loss": 0.01, "train/grad_norm": 0.5}

`step` counts in the unit of `step_key` (rollouts for rollout/step and eval/step, optimizer steps for train/step).
`time` is Unix seconds. JSON has no NaN, so a value that is not finite is null, and the extra entry `"nonfinite":
{"train/loss": "nan"}` has the value.
"""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from slime.system.disk_space import DiskSpaceGuard
from slime.tracking.metrics import RESERVED, STEP_KEYS, StepKey
from slime.tracking.run_files import Line, is_number, is_whole_number, open_file, parse, read_lines
from slime.tracking.trackers.record import State

logger = logging.getLogger(__name__)
METRICS_FILE = "metrics.jsonl"
DROPPED_FILE = "metrics.dropped.jsonl"


class JsonlTracker:
    """Appends to `path` and flushes each line, so a killed run loses at most the line that it was writing.

    `resume` maps a step key to the first step that will be logged again. Lines from that step on, and damaged lines,
    move to `metrics.dropped.jsonl` in the same directory, and the file is replaced atomically. An incomplete last line
    (the run was killed while writing) is removed.
    """

    def __init__(self, path: Path, resume: Mapping[str, int]) -> None:
        self._path = Path(path)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        if self._path.exists():
            self._drop_replayed(resume)
        self._file = open(self._path, "a", encoding="utf-8")  # noqa: SIM115 (closed by close())

    def log(self, metrics: Mapping[str, float], step: int, step_key: StepKey) -> None:
        line: dict[str, object] = {"step_key": step_key, "step": step, "time": time.time()}
        line |= {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        nonfinite = {name: str(value) for name, value in metrics.items() if not math.isfinite(value)}
        if nonfinite:
            line["nonfinite"] = nonfinite
        with DiskSpaceGuard("--run-dir", self._path.parent, self._path.name):
            self._file.write(json.dumps(line, allow_nan=False) + "\n")
            self._file.flush()

    def close(self, state: State = "finished") -> None:
        with DiskSpaceGuard("--run-dir", self._path.parent, self._path.name):
            self._file.close()

    def _drop_replayed(self, resume: Mapping[str, int]) -> None:
        kept: list[bytes] = []
        dropped: list[bytes] = []
        found = MetricLines(self._path)
        for line, row in found.both():
            replayed = row is None or (
                row["step_key"] in resume and row["step"] >= resume[str(row["step_key"])]
            )
            (dropped if replayed else kept).append(line)
        if not dropped and not found.torn:
            return
        if found.damaged:
            logger.warning(
                "%s had %d damaged lines, which are in %s now", self._path, found.damaged, DROPPED_FILE
            )
        if dropped:
            with open(self._path.with_name(DROPPED_FILE), "ab") as file:
                file.writelines(dropped)
        temporary = self._path.with_name(self._path.name + ".tmp")
        with open(temporary, "wb") as file:
            file.writelines(kept)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, self._path)


@dataclass
class MetricLines:
    """Reads the records of a metrics.jsonl, and counts the lines that are not records."""

    path: Path
    damaged: int = 0
    torn: bool = field(default=False)
    """True if the file ends with a line that a killed run did not finish. Such a line does not count as damaged."""

    def __iter__(self) -> Iterator[Line]:
        return (row for _, row in self.both() if row is not None)

    def both(self) -> Iterator[tuple[bytes, Line | None]]:
        """Yields each line with its end, and its record, or None for a damaged line. Yields nothing if the file does
        not exist."""
        self.damaged, self.torn = 0, False
        file = open_file(self.path.parent, self.path.name)
        if file is None:
            return
        with file:
            for line in read_lines(file):
                row = metric_record(line)
                if not line.endswith(b"\n"):
                    self.torn = True
                    if row is not None:
                        yield line + b"\n", row
                    return
                self.damaged += row is None
                yield line, row


def next_train_step(path: Path, rollout_id: int) -> int | None:
    """Returns the number after the last optimizer step in a metrics.jsonl of rollouts before `rollout_id`, or None
    without one.

    The lines of a rollout's optimizer steps follow its own line.
    """
    rollout, found = -1, None
    for row in MetricLines(path):
        step = row["step"]
        assert isinstance(step, int), "a record has a whole number"
        if row["step_key"] == "rollout/step":
            rollout = step
        elif row["step_key"] == "train/step" and 0 <= rollout < rollout_id:
            found = step + 1
    return found


def metric_record(line: bytes) -> Line | None:
    """Returns the record in a line, with None for a value that is not finite, as `log` writes it.

    Returns None unless the line has a step in a known unit, and numbers under the names of metrics.
    """
    if (row := parse(line)) is None:
        return None
    step = row.get("step")
    if row.get("step_key") not in STEP_KEYS or not is_whole_number(step) or step < 0:
        return None
    for name in row.keys() - RESERVED:
        value = row[name]
        if type(value) is float and not is_number(value):
            row[name] = None
        elif value is not None and not is_number(value):
            return None
    words = row.get("nonfinite", {})
    if not isinstance(words, dict) or not all(isinstance(word, str) for word in words.values()):
        return None
    return row if is_number(row.get("time", 0.0)) else None
