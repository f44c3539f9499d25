"""`vime trace RUN_DIR [--steps A:B] [--out FILE]`: writes a timeline of every process for Perfetto, from the journal of
a run.

The file is in the Trace Event Format, which https://ui.perfetto.dev and chrome://tracing open. It shows each process of
the run with lanes for its devices, the groups in generation, and the work of the engines.
"""

from __future__ import annotations

import argparse
import gzip
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from slime.config.sections.debug import profiled_steps
from slime.tracking.journal import Event, Phase, phases, read_events
from vime.view.spans import Lanes, TraceEvent, TraceSpan, Tracks, ended_spans, group_spans, weight_spans

_PHASES = ("run", "end", "error", "phase_begin", "phase_end")
_MARKS = (
    "start",
    "step",
    "checkpoint",
    "evaluation",
    "engine",
    "dropped",
    "warning",
    "concern_begin",
    "concern_end",
    "end",
    "error",
)
"""Kinds of events that appear as arrows above the lanes of their process."""
_SHOWN = {
    "start": "rollout",
    "step": "rollout",
    "checkpoint": "after rollout",
    "evaluation": "after rollouts",
}
GROUPS, TURNS, ENGINES = "groups", "turns of sessions", "engines"


def main(argv: Sequence[str]) -> None:
    """Writes the file and prints its path. Raises ValueError for a directory without a run, or for steps that the run
    does not have."""
    args = _parser().parse_args(argv)
    steps = profiled_steps(args.steps, "--steps")
    begin, end = window(args.run_dir, steps)
    name = f"run-{steps.start}-{steps.stop}" if steps else "run"
    out: Path = args.out or args.run_dir / "profile" / f"{name}.json.gz"
    content = {
        "displayTimeUnit": "ms",
        "otherData": {"run": str(args.run_dir), "steps": args.steps or "all", "begin": begin},
        "traceEvents": list(trace(args.run_dir, begin, end)),
    }
    write(out, json.dumps(content).encode())
    print(
        f"{out}: {len(content['traceEvents']):,} events of {end - begin:.1f} s; open it in https://ui.perfetto.dev"
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="vime trace",
        description="Write a timeline of all processes of a run, which https://ui.perfetto.dev opens.",
        allow_abbrev=False,
    )
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR")
    parser.add_argument(
        "--steps", metavar="A:B", help="rollouts A to B-1, from the start of their generation"
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="default: profile/run-A-B.json.gz in RUN_DIR; .gz is compressed",
    )
    return parser


def write(out: Path, content: bytes) -> None:
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_bytes(gzip.compress(content, 6) if out.suffix == ".gz" else content)
    except OSError as error:
        raise ValueError(
            f"--out must be a file that can be written, got {out} ({error}); name another"
        ) from error


def window(run_dir: Path, steps: range) -> tuple[float, float]:
    """Returns the first and last moment of these rollouts in seconds since the epoch, or of the whole run without
    `steps`.

    A rollout that was trained twice, before and after a restart, counts from the first time.
    """
    first, last = float("inf"), 0.0
    known = set[int]()
    events = read_events(run_dir)
    if not steps:
        times = [event.time for event in events if event.kind != "journal"]
        if not times:
            raise ValueError(f"RUN_DIR must have events, got none in {run_dir}; wait until the run has begun")
        return min(times), max(times)
    for event in events:
        rollout = event.get("rollout")
        if event.kind not in ("phase_begin", "phase_end", "step") or not isinstance(rollout, int):
            continue
        known.add(rollout)
        if rollout in steps:
            first, last = min(first, event.time), max(last, event.time)
    if not last:
        has = f"{min(known)} to {max(known)}" if known else "none"
        raise ValueError(
            f"--steps must name rollouts of the run, got {steps.start}:{steps.stop}, and it has {has}; choose of those"
        )
    return first, last


def trace(run_dir: Path, begin: float, end: float) -> Iterator[TraceEvent]:
    """Yields the trace events between two moments, in microseconds since the first moment."""
    tracks = Tracks(begin)
    for span in _phase_spans(run_dir, begin, end):
        yield tracks.span(span)
    parts = ended_spans(run_dir, "part", ENGINES, "updates", "part {part} of weights {version}")
    turns = ended_spans(run_dir, "turn", TURNS, "turn", "{session} turn {turn}")
    for spans in (group_spans(run_dir, GROUPS), weight_spans(run_dir, ENGINES), parts, turns):
        for span in spans:
            if span.end >= begin and span.begin <= end:
                yield tracks.span(span)
    for event in read_events(run_dir, (*_MARKS, "load"), since=begin):
        if event.time <= end:
            yield (
                tracks.load(event, ENGINES)
                if event.kind == "load"
                else tracks.mark(event.source, event.time, _title(event), event.fields)
            )
    yield from tracks.names()


def _title(event: Event) -> str:
    if event.kind in _SHOWN:
        return f"{event.kind} {_SHOWN[event.kind]} {event['rollout']}"
    if event.kind == "engine":
        return f"{event['engine']} {event['state']}"
    return f"dropped: {event['reason']}" if event.kind == "dropped" else event.kind


def _phase_spans(run_dir: Path, begin: float, end: float) -> Iterator[TraceSpan]:
    """Yields the phases as spans. The phases in a lane are nested or follow each other."""
    lanes = Lanes()
    found = [phase for phase in phases(read_events(run_dir, _PHASES)) if _overlaps(phase, begin, end)]
    for phase in sorted(found, key=lambda phase: (phase.begin, -(phase.end or end))):
        stop = end if phase.end is None else phase.end
        lane = lanes.assign((phase.source, phase.device), phase.begin, stop)
        known = {"rollout": phase.rollout, "device": phase.device, "ended": phase.end is not None}
        fields = {name: value for name, value in known.items() if value not in (None, "")}
        title = phase.name if phase.rollout is None else f"{phase.name} {phase.rollout}"
        yield TraceSpan(phase.source, phase.device or "main", lane, title, phase.begin, stop, fields)


def _overlaps(phase: Phase, begin: float, end: float) -> bool:
    return phase.begin <= end and (phase.end is None or phase.end >= begin)
