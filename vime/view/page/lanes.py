"""Builds the timeline of a run from its journal: one lane per process and device, as columns of numbers, which the page
draws.

Phases of a lane that overlap are in different rows. An engine's lane shows its states over time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from slime.config.secrets import mask_secrets
from slime.tracking.journal import Event, phases, read_events

MARKS = {
    "checkpoint": "checkpoint after rollout {rollout}",
    "evaluation": "evaluation after {rollout} rollouts",
    "weights": "has version {version} of the weights",
    "dropped": "dropped: {reason}",
    "put_back": "put back",
    "warning": "{logger}: {text}",
    "concern_begin": "{name}: {text}",
    "concern_end": "{name}: no longer so",
    "error": "{type}: {text}",
    "end": "the run is {state}",
    "run": "the run begins",
}
"""Kinds of events that are moments, with the page's text for each kind."""
_LONGEST = 200
_LOOKED_AT = 4000
_GONE = ("dead", "removed", "failed")
"""States of an engine without a server. They are shown as moments of its lane."""


@dataclass
class Timeline:
    """The timeline of a run. Times are seconds after `origin`, which is in seconds since the epoch."""

    origin: float = 0.0
    lanes: list[list[str]] = field(default_factory=list)
    """Source and device."""
    names: list[str] = field(default_factory=list)
    spans: list[list[float | int | None]] = field(default_factory=list)
    """Lane, row, index in `names`, begin, end (None: still running), rollout (None: no rollout), sorted by begin."""
    marks: list[list[float | int | str]] = field(default_factory=list)
    """Lane, time, kind, text."""
    steps: list[list[float | int]] = field(default_factory=list)
    """Each step's rollout, begin and end."""
    end: float = 0.0


@dataclass
class _LaneSpan:
    lane: tuple[str, str]
    name: str
    begin: float
    end: float | None
    rollout: int | None


def read_timeline(run_dir: Path) -> Timeline:
    """Reads the timeline. Raises ValueError for a directory without a journal, or one that may not be read."""
    events = [event for event in read_events(run_dir) if event.kind != "journal"]
    if not events:
        return Timeline()
    origin = min(event.time for event in events)
    found = [_LaneSpan((p.source, p.device), p.name, p.begin, p.end, p.rollout) for p in phases(events)]
    found = sorted([*found, *_engines(events)], key=lambda span: span.begin)
    lanes = _lanes(found, events)
    names = sorted({span.name for span in found})
    timeline = Timeline(origin, [list(lane) for lane in lanes], names)
    lane_rows = {lane: number for number, lane in enumerate(lanes)}
    for span, row in zip(found, _rows(found), strict=True):
        begin, end = round(span.begin - origin, 4), None if span.end is None else round(span.end - origin, 4)
        timeline.spans.append([lane_rows[span.lane], row, names.index(span.name), begin, end, span.rollout])
    first = {lane[0]: number for number, lane in reversed(list(enumerate(lanes)))}
    timeline.marks = [mark for event in events for mark in _marks(event, first, origin)]
    timeline.steps = _steps(events, origin)
    timeline.end = round(max(event.time for event in events) - origin, 4)
    return timeline


def _lanes(spans: Sequence[_LaneSpan], events: Sequence[Event]) -> list[tuple[str, str]]:
    """Sorts the lanes: the driver, then the generating process, then engines, then trainers, each with its devices."""
    order = ("driver", "rollout", "engines", "engine", "trainer")
    found = {span.lane for span in spans}
    named = {lane[0] for lane in found}
    found |= {(source, "") for event in events for source in _marked(event) if source not in named}

    def key(lane: tuple[str, str]) -> tuple[int, list[tuple[int, str]]]:
        source = lane[0]
        whose = source if source in order else source.rpartition("-")[0]
        parts = [(int(part) if part.isdecimal() else -1, part) for part in (*source.split("-"), lane[1])]
        return order.index(whose) if whose in order else len(order), parts

    return sorted(found, key=key)


def _rows(spans: Iterable[_LaneSpan]) -> list[int]:
    """Returns, for each span, its lane's first row that is free at the span's begin. `spans` are sorted by begin."""
    ends: dict[tuple[str, str], list[float]] = {}
    rows = []
    for span in spans:
        lane = ends.setdefault(span.lane, [])
        row = next((number for number, end in enumerate(lane) if end <= span.begin), len(lane))
        lane[row : row + 1] = [float("inf") if span.end is None else span.end]
        rows.append(row)
    return rows


def _engines(events: Iterable[Event]) -> list[_LaneSpan]:
    """Returns each engine's states over time: starting, serving, leaving."""
    open_: dict[str, _LaneSpan] = {}
    found: list[_LaneSpan] = []
    last = 0.0
    for event in events:
        if event.kind in ("run", "end", "error", "control_socket"):  # engines of an earlier process are gone
            over = event.time if event.kind in ("end", "error") else last
            for span in open_.values():
                span.end = max(over, span.begin)
            open_.clear()
        last = max(last, event.time)
        if event.kind != "engine":
            continue
        name, state = str(event["engine"]), str(event["state"])
        if name in open_:
            open_.pop(name).end = event.time
        if state not in _GONE:
            open_[name] = _LaneSpan((name, ""), state, event.time, None, None)
            found.append(open_[name])
    return found


def _marked(event: Event) -> list[str]:
    """Returns the processes or engines whose lanes show a mark of the event."""
    if event.kind == "engine":
        return [str(event["engine"])] if event["state"] in _GONE else []
    if event.kind == "weights":
        return [str(name) for name in event["engines"]]
    return [event.source] if event.kind in MARKS else []


def _marks(event: Event, lanes: dict[str, int], origin: float) -> list[list[float | int | str]]:
    kind = str(event["state"]) if event.kind == "engine" else event.kind
    text = "the engine is {state}" if event.kind == "engine" else MARKS.get(event.kind, "")
    text_shown = str(mask_secrets(text.format(**event.fields)[:_LOOKED_AT]))[:_LONGEST]
    return [[lanes[source], round(event.time - origin, 4), kind, text_shown] for source in _marked(event)]


def _steps(events: Iterable[Event], origin: float) -> list[list[float | int]]:
    found: list[list[float | int]] = []
    begin: float | None = None
    for event in events:
        if event.kind == "start":
            begin = event.time
        elif event.kind == "step" and begin is not None:
            found.append([event["rollout"], round(begin - origin, 4), round(event.time - origin, 4)])
            begin = event.time
    return found
