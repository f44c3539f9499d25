"""events.jsonl of a run: what happened, one JSON object per line, appended by every process.

    {"time": 1767225600.0, "source": "rollout", "kind": "drawn", "groups": [8, 9], "version": 2}

| source | kind | fields | |
| --- | --- | --- | --- |
| driver | start | rollout | a run starts, or resumes at this rollout |
| driver | step | rollout, seconds of STEP_PARTS | trained; its line is in metrics.jsonl; its parts in their order |
| driver | checkpoint | rollout | the checkpoint after it is complete, or its files are being written |
| engines | door | socket, host, pid | a run starts its engines; where `vime engines` reaches it |
| engines | engine | model, engine, state, and of one that starts: address, place | see `vime.members.table` |
| engines | weights | model, engines, version | these engines have loaded that version |
| rollout | drawn | groups, version | generation starts; the weights of the engines |
| rollout | ended | groups | they have their responses and rewards, or were given up |
| rollout | dropped | groups, reason | they will not be trained |
| rollout | put_back | groups | they return to the data source with their tokens |
| rollout | batch | rollout, groups, over_limit | they are the batch; samples older than allowed |
| rollout | position | rollout | the data position after the batch is saved |
| rollout | handed | rollout | the batch is train data, and the trainer may take it |

`slime.tracking.ledger` reads them.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

from slime.disk_space import Room

EVENTS_FILE = "events.jsonl"
STEP_PARTS = ("train_wait", "train", "update_weights")
_BEGIN = b'{"time": '
"""Of each line. No field of an event has it: quotes in text are escaped."""


class Events:
    """Appends to the file of `run_dir`; without one, nothing is written.

    Each line is one write to a file that was opened for appending, so that the lines of several processes do not mix.
    A process that is killed, or a disk that is full, leaves a line that is cut, to which the next line is appended.
    """

    def __init__(self, source: str, run_dir: str | None) -> None:
        self._source, self._path, self._file = source, run_dir and Path(run_dir) / EVENTS_FILE, -1

    def add(self, kind: str, **fields: object) -> None:
        if not self._path:
            return
        with Room("--run-dir", self._path.parent, "the run's events"):
            if self._file < 0:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            line = {"time": time.time(), "source": self._source, "kind": kind, **fields}
            left = json.dumps(line).encode() + b"\n"
            while left:  # the write that fills the disk writes a part and fails not; the next one fails
                left = left[os.write(self._file, left) :]

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def read_events(run_dir: Path) -> Iterator[dict[str, object] | None]:
    """The events of a run in their order. None for a line that a killed process or a full disk has cut. The event that
    follows it in the same line counts."""
    path = run_dir / EVENTS_FILE
    if not path.is_file():
        raise ValueError(
            f"RUN_DIR must have {EVENTS_FILE}, got none in {run_dir}; name the --run-dir of a run"
        )
    with path.open("rb") as lines:
        for line in lines:
            if (begins := line.rfind(_BEGIN)) > 0:
                yield None
            try:
                event = json.loads(line[max(begins, 0) :])
            except ValueError:
                event = None
            yield event if isinstance(event, dict) else None
