"""metrics.jsonl, which every run writes.

It has one flat JSON object per `log` call, one per line, so `pandas.read_json(path, lines=True)` returns one column per
metric:

    {"step_key": "train/step", "step": 3, "time": 1767225600.0, "train/loss": 0.01, "train/grad_norm": 0.5}

`step` counts in the unit of `step_key` (rollouts for rollout/step and eval/step, optimizer steps for
train/step). `time` is Unix seconds. JSON has no NaN, so a value that is not finite is null, and the extra entry
`"nonfinite": {"train/loss": "nan"}` has the value.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slime.disk_space import Room
from slime.tracking.metrics import STEP_KEYS, StepKey
from slime.tracking.trackers.record import State

METRICS_FILE = "metrics.jsonl"
DROPPED_FILE = "metrics.dropped.jsonl"


class JsonlTracker:
    """Appends to `path` and flushes each line, so a killed run loses at most the line that it was writing.

    `resume` maps a step key to the first step that will be logged again. Lines from that step on move to
    `metrics.dropped.jsonl` in the same directory, and the file is replaced atomically. An incomplete last line (the
    run was killed while writing) is removed. Any other unreadable line is a ValueError with its number.
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
        with Room("--run-dir", self._path.parent, self._path.name):
            self._file.write(json.dumps(line, allow_nan=False) + "\n")
            self._file.flush()

    def close(self, state: State = "finished") -> None:
        with Room("--run-dir", self._path.parent, self._path.name):
            self._file.close()

    def _drop_replayed(self, resume: Mapping[str, int]) -> None:
        text = self._path.read_text(encoding="utf-8", errors="replace")
        kept: list[str] = []
        dropped: list[str] = []
        for line, row in read_metric_lines(text, self._path):
            replayed = row["step_key"] in resume and row["step"] >= resume[row["step_key"]]
            (dropped if replayed else kept).append(line + "\n")
        if "".join(kept) == text:
            return
        if dropped:
            with open(self._path.with_name(DROPPED_FILE), "a", encoding="utf-8") as file:
                file.writelines(dropped)
        temporary = self._path.with_name(self._path.name + ".tmp")
        with open(temporary, "w", encoding="utf-8") as file:
            file.writelines(kept)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, self._path)


def read_metric_lines(text: str, path: Path, first: int = 1) -> list[tuple[str, dict[str, Any]]]:
    """(line, parsed line) of each line of a metrics.jsonl; `text` begins with its line `first`. A last line without its
    newline is left out unless it parses. Any other line that is not a metric record raises ValueError with its number.
    """
    lines = text.split("\n")
    torn = lines.pop()
    out = []
    for number, line in enumerate([*lines, torn] if torn else lines, start=first):
        try:
            row = json.loads(line)
            if not isinstance(row["step"], int) or row["step_key"] not in STEP_KEYS:
                raise ValueError("no step")
        except (ValueError, KeyError, TypeError) as error:
            if number >= first + len(lines):
                break
            raise ValueError(
                f"{path} line {number} must be a JSON object with step and step_key, got {line[:80]!r}; "
                "move the file away or remove the line"
            ) from error
        out.append((line, row))
    return out
