"""Builds the parts of a trace for Perfetto: spans, the lanes that hold them without overlap, and their JSON records.

https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU (Trace Event Format): "X" is a span, "i"
a moment, "C" a counter, "M" a name. A thread of the format is one lane. The spans of a lane may be nested, but may not
overlap otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from slime.tracking.journal import Event, read_events

TraceEvent: TypeAlias = dict[str, object]
_US = 1e6
FIRST = ("driver", "rollout")


@dataclass(frozen=True)
class TraceSpan:
    """A span from `begin` to `end`, in seconds since the epoch."""

    process: str
    track: str
    lane: int
    """Index of the lane in its track, from 0."""
    title: str
    begin: float
    end: float
    fields: Mapping[str, object] = field(default_factory=dict)


class Lanes:
    """Finds the first free lane for each span of a track. Spans must come in the order of their begin."""

    def __init__(self, *, nested: bool = True) -> None:
        self._nested = nested
        self._lanes: dict[tuple[str, ...], list[list[float]]] = {}

    def assign(self, track: tuple[str, ...], begin: float, end: float) -> int:
        lanes = self._lanes.setdefault(track, [])
        for number, ends in enumerate(lanes):
            while ends and ends[-1] <= begin:
                ends.pop()
            if not ends or (self._nested and end <= ends[-1]):
                ends.append(end)
                return number
        lanes.append([end])
        return len(lanes) - 1


class Tracks:
    """Numbers processes and lanes in the order of their arrival, and makes the records. `begin` is time 0."""

    def __init__(self, begin: float) -> None:
        self._begin = begin
        self._processes: dict[str, int] = {}
        self._lanes: dict[tuple[str, str, int], int] = {}

    def span(self, span: TraceSpan) -> TraceEvent:
        pid, tid = self._position(span.process, span.track, span.lane)
        begin, end = self._us(span.begin), self._us(span.end)
        found = {"ph": "X", "name": span.title, "cat": span.process, "pid": pid, "tid": tid}
        return found | {"ts": begin, "dur": max(end - begin, 0), "args": dict(span.fields)}

    def mark(self, process: str, moment: float, title: str, fields: Mapping[str, object]) -> TraceEvent:
        found = {"ph": "i", "s": "p", "name": title, "pid": self._process(process)}
        return found | {"tid": 0, "ts": self._us(moment), "args": dict(fields)}

    def load(self, event: Event, process: str) -> TraceEvent:
        """Makes the counters of an engine. The share of its cache is in percent, so that one axis fits all counters."""
        values = {
            "running": event["running"],
            "waiting": event["waiting"],
            "kv_cache_percent": 100 * event["kv_cache"],
        }
        found = {"ph": "C", "name": f"{event['model']} {event['engine']}", "pid": self._process(process)}
        return found | {"ts": self._us(event.time), "args": values}

    def names(self) -> Iterator[TraceEvent]:
        for process, pid in self._processes.items():
            yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": process}}
            yield {
                "ph": "M",
                "name": "process_sort_index",
                "pid": pid,
                "args": {"sort_index": self._order(process, pid)},
            }
        for (process, track, lane), tid in self._lanes.items():
            name = f"{track} {lane}" if lane else track
            known = {"pid": self._processes[process], "tid": tid}
            yield {"ph": "M", "name": "thread_name", **known, "args": {"name": name}}
            yield {"ph": "M", "name": "thread_sort_index", **known, "args": {"sort_index": lane}}

    def _order(self, process: str, pid: int) -> int:
        """Returns the position of a process from the top: processes that wait for other processes come first."""
        return FIRST.index(process) if process in FIRST else len(FIRST) + pid

    def _process(self, process: str) -> int:
        return self._processes.setdefault(process, len(self._processes) + 1)

    def _position(self, process: str, track: str, lane: int) -> tuple[int, int]:
        pid = self._process(process)
        return pid, self._lanes.setdefault((process, track, lane), len(self._lanes) + 1)

    def _us(self, moment: float) -> int:
        return round((moment - self._begin) * _US)


@dataclass
class _Group:
    number: int
    begin: float
    end: float | None = None
    fate: dict[str, object] = field(default_factory=dict)


def group_spans(run_dir: Path, process: str) -> Iterator[TraceSpan]:
    """Yields each group from its draw to the end of its last sample, with its fate.

    A group that still runs, or that a killed run left, ends with the last event of a group.
    """
    found, known, last = list[_Group](), dict[int, _Group](), 0.0
    for event in read_events(run_dir, ("drawn", "ended", "kept", "dropped", "put_back", "batch")):
        last = max(last, event.time)
        if event.kind == "drawn":
            groups = [_Group(n, event.time, fate={"version": event["version"]}) for n in event["groups"]]
            known |= {group.number: group for group in groups}
            found += groups
            continue
        for group in (known[number] for number in event["groups"] if number in known):
            group.fate |= _fate(event)
            if event.kind == "ended":
                group.end = event.time
    lanes = Lanes(nested=False)
    for group in sorted(found, key=lambda group: group.begin):
        end = last if group.end is None else group.end
        lane = lanes.assign((process,), group.begin, end)
        title = f"group {group.number}"
        yield TraceSpan(process, "in generation", lane, title, group.begin, end, group.fate)


def _fate(event: Event) -> dict[str, object]:
    match event.kind:
        case "ended":
            names = {"sample": "slowest_sample", "seconds": "slowest_s", "tokens": "slowest_tokens"}
            return {shown: event[name] for name, shown in names.items() if name in event.fields}
        case "batch":
            return {"rollout": event["rollout"]}
        case "dropped":
            return {"fate": f"dropped: {event['reason']}"}
    return {"fate": event.kind.replace("_", " ")}


def weight_spans(run_dir: Path, process: str) -> Iterator[TraceSpan]:
    """Yields each engine's weight version over time, while it serves."""
    serving: dict[tuple[str, str], tuple[float, object]] = {}
    last = 0.0

    def until(engine: tuple[str, str], end: float) -> Iterator[TraceSpan]:
        if (since := serving.pop(engine, None)) is not None:
            version = "of the checkpoint" if since[1] is None else since[1]
            fields = {"version": since[1], "model": engine[0]}
            yield TraceSpan(process, " ".join(engine), 0, f"weights {version}", since[0], end, fields)

    for event in read_events(run_dir, ("engine", "weights", "control_socket", "end", "error")):
        last = max(last, event.time)
        for engine in _named(event, serving):
            yield from until(engine, event.time)
            if event.kind == "weights" or event.get("state") in ("serving", "leaving"):
                serving[engine] = (event.time, event.get("version"))
    for engine in list(serving):
        yield from until(engine, last)


def ended_spans(run_dir: Path, kind: str, process: str, track: str, title: str) -> Iterator[TraceSpan]:
    """Yields spans of events that are logged at their end: parts of updates, turns of sessions. `title` has names of
    fields."""
    found = [(event.time - event["seconds"], event) for event in read_events(run_dir, (kind,))]
    lanes = Lanes(nested=False)
    for begin, event in sorted(found, key=lambda pair: pair[0]):
        lane = lanes.assign((track,), begin, event.time)
        yield TraceSpan(process, track, lane, title.format(**event.fields), begin, event.time, event.fields)


def _named(event: Event, serving: Mapping[tuple[str, str], object]) -> list[tuple[str, str]]:
    """Returns the engines, as (model, name), that an event concerns: all engines for the begin or end of a run."""
    if event.kind == "engine":
        return [(event["model"], event["engine"])]
    if event.kind == "weights":
        return [(event["model"], name) for name in event["engines"]]
    return list(serving)
