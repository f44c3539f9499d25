"""events.jsonl of a run: what happened, one JSON object per line, appended by every process.

    {"time": 1767225600.0, "source": "rollout", "kind": "drawn", "groups": [8, 9], "version": 2}

| source | kind | fields | |
| --- | --- | --- | --- |
| driver | start | rollout | a run starts, or resumes at this rollout |
| driver | step | rollout | the rollout was trained, and its line is in metrics.jsonl |
| driver | checkpoint | rollout | the checkpoint after it is complete, or its files are being written |
| engines | door | socket, host, pid | a run starts its engines; where `vime engines` reaches it |
| engines | engine | model, engine, state, and of one that starts: address, place | see `vime.members.table` |
| engines | weights | model, engines, version | these engines have loaded that version |
| rollout | drawn | groups, version | generation starts; the weights of the engines |
| rollout | dropped | groups, reason | they will not be trained |
| rollout | put_back | groups | they return to the data source with their tokens |
| rollout | batch | rollout, groups, over_limit | they are the batch; samples older than allowed |
| rollout | position | rollout | the data position after the batch is saved |

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


class Events:
    """Appends to the file of `run_dir`; without one, nothing is written.

    Each line is one write to a file that was opened for appending, so that the lines of several processes do not mix,
    and a killed process leaves at most one line that is cut.
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
            os.write(self._file, json.dumps(line).encode() + b"\n")

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def read_events(run_dir: Path) -> Iterator[dict[str, object] | None]:
    """The events of a run in their order. None for a line that a killed process has cut."""
    path = run_dir / EVENTS_FILE
    if not path.is_file():
        raise ValueError(
            f"RUN_DIR must have {EVENTS_FILE}, got none in {run_dir}; name the --run-dir of a run"
        )
    with path.open("rb") as lines:
        for line in lines:
            try:
                event = json.loads(line)
            except ValueError:
                event = None
            yield event if isinstance(event, dict) else None
