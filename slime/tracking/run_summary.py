"""Summarises the state of a run from its journal and each metric's newest line.

Reads files only, so it works while the run is running, after its end, and from another host.
"""

from __future__ import annotations

import contextlib
import itertools
import socket
import statistics
import time
from collections import Counter, deque
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from slime.tracking.journal import Event, OpenPhases, Phase, Tail
from slime.tracking.kinds import EVENTS_FILE
from slime.tracking.run_engines import EngineRecord, RunEngines
from slime.tracking.run_files import is_whole_number, read_object
from slime.tracking.run_record import born
from slime.tracking.trackers import METRICS_FILE, RESERVED, MetricLines

RunState = Literal["running", "finished", "failed", "interrupted"]
SILENT_S = 600.0
"""Seconds without an event, and at least three steps, after which a run on another host counts as failed."""
_STEPS = 10
"""Number of newest steps that give the time of a step."""


@dataclass
class RunSummary:
    """The state of a run. Times are seconds since the epoch."""

    run_dir: Path
    state: RunState = "running"
    cause: str = ""
    """Reason of a failure or an interrupt, in one line."""
    error_type: str = ""
    """Class of the error that ended the run, or ""."""
    started: float = 0.0
    """Start time of the present, or last, process of the run."""
    updated: float = 0.0
    """Time of the newest event."""
    rollout: int | None = None
    """Last rollout that was trained."""
    saved: int | None = None
    """Rollout of the newest checkpoint in the journal."""
    rollouts: int | None = None
    """Total number of rollouts of the run."""
    step_s: float | None = None
    """Median seconds of the newest steps."""
    eta_s: float | None = None
    """Seconds until the last step of a running run."""
    engines: dict[str, EngineRecord] = field(default_factory=dict)
    doing: list[Phase] = field(default_factory=list)
    """Phases that have begun and not ended."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Each metric's newest value; NaN if it was not finite."""
    evaluations: dict[int, dict[str, float]] = field(default_factory=dict)
    """Scores by the number of trained rollouts."""
    warnings: list[Event] = field(default_factory=list)
    """Events of the kinds warning and concern_begin."""
    concerns: dict[str, Event] = field(default_factory=dict)
    """Each concern's newest event, by its name. A concern lasts after a concern_begin."""
    deaths: Counter[str] = field(default_factory=Counter)
    """Number of deaths by engine."""
    trainer: list[Event] = field(default_factory=list)
    """Events of the kinds trainer_lost and trainer_restarted."""
    manager: list[Event] = field(default_factory=list)
    """Events of the kinds manager_lost and manager_restarted."""
    starts: int = 0
    damaged: Counter[str] = field(default_factory=Counter)
    """Number of unreadable lines per file, which are left out."""

    @property
    def progress(self) -> float:
        """Returns the share of the rollouts that were trained."""
        return (
            0.0 if self.rollout is None or not self.rollouts else min(1.0, (self.rollout + 1) / self.rollouts)
        )


def run_summary(run_dir: Path) -> RunSummary:
    """Returns the summary. Raises ValueError for a directory without a run's journal, or an unreadable one."""
    so_far, journal = SummaryOfEvents(run_dir), Tail(run_dir)
    for event in journal.new(last=True):
        so_far.add(event)
    summary = so_far.summary()
    metrics = MetricLines(summary.run_dir / METRICS_FILE)
    summary.metrics = _newest(metrics)
    summary.damaged = Counter({EVENTS_FILE: journal.damaged, METRICS_FILE: metrics.damaged})
    return summary


class SummaryOfEvents:
    """Builds the summary of a run event by event, for a reader that follows the run."""

    def __init__(self, run_dir: Path) -> None:
        self._summary, self._engines, self._phases = RunSummary(Path(run_dir)), RunEngines(), OpenPhases()
        self._ends = deque[float](maxlen=_STEPS + 1)
        self._run: Event | None = None

    def add(self, event: Event) -> None:
        self._summary.updated = max(self._summary.updated, event.time)
        self._engines.add(event)
        self._phases.add(event)
        if event.kind in ("run", "start"):
            self._ends.clear()
        if event.kind in ("start", "step"):
            self._ends.append(event.time)
        if event.kind == "run":
            self._run = event
        if event.kind in ("trainer_lost", "trainer_restarted"):
            self._summary.trainer.append(event)
        if event.kind in ("manager_lost", "manager_restarted"):
            self._summary.manager.append(event)
        _add(self._summary, event)

    def summary(self) -> RunSummary:
        """Returns the current summary without the metrics. Each call checks again whether the run is running."""
        summary = replace(self._summary, engines=self._engines.engines)
        if len(self._ends) > 1:
            summary.step_s = statistics.median(b - a for a, b in itertools.pairwise(self._ends))
        _judge(summary, self._run)
        if summary.state == "running":
            summary.doing = self._phases.going_on()
            if summary.step_s is not None and summary.rollouts is not None and summary.rollout is not None:
                summary.eta_s = summary.step_s * (summary.rollouts - summary.rollout - 1)
        return summary


def _add(summary: RunSummary, event: Event) -> None:
    """Updates the summary of the whole run with one event."""
    match event.kind:
        case "run":
            summary.started, summary.rollouts = event.time, event["rollouts"]
            summary.state, summary.cause, summary.error_type = "running", "", ""
            summary.concerns = {}  # the new process observes its own concerns
        case "start":
            summary.starts += 1
            summary.started = summary.started or event.time
            summary.rollout = event["rollout"] - 1 if event["rollout"] else None
        case "step":
            summary.rollout = event["rollout"]
        case "checkpoint":
            summary.saved = event["rollout"]
        case "evaluation":
            summary.evaluations[event["rollout"]] = event["scores"]
        case "engine":
            if event["state"] == "dead":
                summary.deaths[event["engine"]] += 1
        case "warning" | "concern_begin" | "concern_end":
            _add_warning(summary, event)
        case "end":
            summary.state = event["state"]
            summary.cause = "interrupted by its user" if event["state"] == "interrupted" else ""
        case "error":
            summary.state, summary.cause, summary.error_type = "failed", event["text"], event["type"]


def _add_warning(summary: RunSummary, event: Event) -> None:
    if event.kind != "warning":
        summary.concerns[event["name"]] = event
    if event.kind != "concern_end":
        summary.warnings.append(event)


def _judge(summary: RunSummary, run: Event | None) -> None:
    """Decides whether a run without an end in its journal is still running."""
    if summary.state != "running":
        return
    if run is None:  # a journal of an older version has less information
        summary.rollouts = _rollouts(summary.run_dir)
        if summary.rollouts is not None and summary.rollout == summary.rollouts - 1:
            summary.state = "finished"
        elif is_silent(summary):
            summary.state, summary.cause = "failed", _silence(summary, "its journal is of an older version")
    elif run["host"] == socket.gethostname():
        if born(run["pid"]) != run["born"]:
            summary.state = "failed"
            summary.cause = (
                f"its driver, process {run['pid']}, ended without a word: killed, or the host went down"
            )
    elif is_silent(summary):
        summary.state, summary.cause = "failed", _silence(summary, f"its driver was on {run['host']}")


def is_silent(summary: RunSummary) -> bool:
    return time.time() - summary.updated > max(SILENT_S, 3 * (summary.step_s or 0.0))


def _silence(summary: RunSummary, why: str) -> str:
    return f"no event for {(time.time() - summary.updated) / 60:.0f} minutes; {why}"


def _rollouts(run_dir: Path) -> int | None:
    with contextlib.suppress(OSError, ValueError):
        found = read_object(run_dir, "config.json").get("num_rollout")
        return found if is_whole_number(found) else None
    return None


def _newest(metrics: MetricLines) -> dict[str, float]:
    """Returns each metric's newest value. The result is empty before the first step."""
    newest: dict[str, float] = {}
    for row in metrics:
        values = {name: row[name] for name in row.keys() - RESERVED}
        newest |= {name: float("nan") if value is None else float(value) for name, value in values.items()}
    return newest
