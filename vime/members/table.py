"""The engines of a run, from its events: `engine` events say what became of each, `weights` events what they loaded.

    starting -> serving -> dead -> starting ...      a server that died is replaced
                serving -> leaving -> removed        `vime engines remove`
    starting -> failed                               `vime engines add`, and no server that serves

A `door` event begins a run: engines of a run before it are gone.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from slime.tracking.events import EVENTS_FILE, read_events

GONE = ("removed", "failed")
ENDED = "ended"


@dataclass
class EngineRecord:
    """One engine of a run."""

    name: str
    model: str
    state: str = ""
    address: str = ""
    place: str = ""
    since: float = 0.0
    """When its present server started, in seconds since the epoch."""
    version: int | None = None
    """Of its weights; None: those of its checkpoint."""


@dataclass
class RunEngines:
    """The engines of the last run in a directory, and where its door is."""

    socket: str = ""
    host: str = ""
    pid: int = 0
    engines: dict[str, EngineRecord] = field(default_factory=dict)

    def add(self, event: dict[str, object]) -> None:
        """One event; other kinds than those of engines change nothing."""
        match event["kind"]:
            case "door":
                self.socket, self.host = str(event["socket"]), str(event["host"])
                self.pid = cast(int, event["pid"])
                self.engines.clear()
            case "engine":
                self._change(event)
            case "weights":
                for name in cast(Iterable[str], event["engines"]):
                    self.engines[name].version = cast(int, event["version"])

    def _change(self, event: dict[str, object]) -> None:
        name = str(event["engine"])
        engine = self.engines.setdefault(name, EngineRecord(name, str(event["model"])))
        engine.state = str(event["state"])
        if engine.state == "starting":
            engine.address, engine.place = str(event["address"]), str(event["place"])
            engine.since, engine.version = cast(float, event["time"]), None
        if engine.state == "serving":
            engine.version = cast("int | None", event["version"])


def read_fleet(run_dir: Path) -> RunEngines:
    """The engines of a run that has ended or goes on. ValueError for a directory without a run, or a run without
    engines."""
    if not run_dir.is_dir():
        raise ValueError(f"RUN_DIR must be a directory, got {run_dir}; name the --run-dir of a run")
    fleet = RunEngines()
    for event in read_events(run_dir):
        if event is not None:
            fleet.add(event)
    if not fleet.socket:
        raise ValueError(
            f"RUN_DIR must be that of a run with engines, got none in {run_dir / EVENTS_FILE}; --debug-train-only has "
            "no engines"
        )
    return fleet


def table(fleet: RunEngines, *, ended: bool) -> list[str]:
    """Lines for a person. `ended`: the run has ended, and its engines with it."""
    rows = [("engine", "model", "state", "weights", "address", "started", "place")]
    for engine in fleet.engines.values():
        state = ENDED if ended and engine.state not in GONE else engine.state
        started = time.strftime("%F %T", time.localtime(engine.since))
        weights = "checkpoint" if engine.version is None else str(engine.version)
        address = engine.address.removeprefix("http://")
        rows.append((engine.name, engine.model, state, weights, address, started, engine.place))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
