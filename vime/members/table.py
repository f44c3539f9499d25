"""Formats the engines of a run (`slime.tracking.run_engines`) as a table."""

from __future__ import annotations

import time
from pathlib import Path

from slime.tracking.journal import read_events
from slime.tracking.kinds import EVENTS_FILE
from slime.tracking.run_engines import ENGINE_KINDS, RunEngines
from vime.doctor.finding import one_line

GONE = ("removed", "failed")
ENDED = "ended"
_LONGEST = 120


def read_engines(run_dir: Path) -> RunEngines:
    """Returns the engines of a running or ended run. Raises ValueError for a directory without a run, and for a run
    without engines."""
    if not run_dir.is_dir():
        raise ValueError(f"RUN_DIR must be a directory, got {run_dir}; name the --run-dir of a run")
    engines = RunEngines()
    for event in read_events(run_dir, ENGINE_KINDS):
        engines.add(event)
    if not engines.socket:
        raise ValueError(
            f"RUN_DIR must be that of a run with engines, got none in {run_dir / EVENTS_FILE}; --debug-train-only has "
            "no engines"
        )
    return engines


def table(engines: RunEngines, *, ended: bool) -> list[str]:
    """Returns the table's lines. `ended` is true if the run has ended, and its engines with it."""
    rows: list[tuple[str, ...]] = [("engine", "model", "state", "weights", "address", "started", "place")]
    for engine in engines.engines.values():
        state = ENDED if ended and engine.state not in GONE else engine.state
        started = time.strftime("%F %T", time.localtime(engine.since))
        weights = "checkpoint" if engine.version is None else str(engine.version)
        address = engine.address.removeprefix("http://")
        row = (engine.name, engine.model, state, weights, address, started, engine.location)
        rows.append(tuple(one_line(text, _LONGEST) for text in row))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
