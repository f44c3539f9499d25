"""Reads the journal of a run, events.jsonl, while the run goes on or after its end.

    read_events(run_dir, kinds=("step",), since=time)    the events so far, in the order of the files
    follow(run_dir)                                      these, and then each new one
    phases(read_events(run_dir))                         who did what from when to when
    slime.tracking.run_summary.run_summary(run_dir)      the state of the run
    slime.tracking.samples.read_samples(run_dir, 3)      samples of a rollout

The events of one process are in their order. Those of several may be half a second out of order; `time` says when.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from slime.tracking.kinds import DAMAGED, EVENTS_FILE, KINDS, VERSION
from slime.tracking.run_files import MOST_OF_LINE, Line, is_number, is_there, lines_of, open_file, parse

_BEGIN = b'{"time": '
"""Of each line. No field of an event has it: quotes in text are escaped."""
_LAST = 1e11
"""Seconds since the epoch that are no time of a run."""


@dataclass(frozen=True)
class Event:
    """One event. `event["rollout"]` is a field; `slime.tracking.kinds` has those of each kind."""

    time: float
    """Seconds since the epoch."""
    source: str
    """The process: driver, rollout, engines, trainer-0, ..."""
    kind: str
    fields: Line = field(default_factory=dict)

    def __getitem__(self, name: str) -> Any:
        return self.fields[name]

    def get(self, name: str, default: object = None) -> Any:
        return self.fields.get(name, default)


def read_events(
    run_dir: Path, kinds: Collection[str] | None = None, since: float | None = None
) -> Iterator[Event]:
    """The events of a run so far: those of `kinds`, and of the time `since` or later.

    Lines that a killed process or a full disk has cut, and those that are no event of `slime.tracking.kinds`, are left
    out, unless `kinds` has `damaged`. Files of older versions are read, also those without a first line. ValueError for
    a directory without a journal, for one that may not be read, and for a journal of a newer version.
    """
    yield from Tail(run_dir, kinds, since).new(last=True)


def follow(
    run_dir: Path,
    kinds: Collection[str] | None = None,
    since: float | None = None,
    *,
    every_s: float = 0.5,
    stop: Callable[[], bool] = lambda: False,
) -> Iterator[Event]:
    """The events so far, and then each new one. Looks every `every_s` seconds, until `stop()`."""
    tail = Tail(run_dir, kinds, since)
    while True:
        yield from tail.new()
        if stop():
            return
        time.sleep(every_s)


class Tail:
    """A place in the journal of a run. Each `new` gives what came after the one before."""

    def __init__(
        self, run_dir: Path, kinds: Collection[str] | None = None, since: float | None = None
    ) -> None:
        self._dir, self._kinds, self._since = Path(run_dir), kinds, since
        self._file: BinaryIO | None = None
        self._number = 1
        self.damaged = 0
        """Lines so far that cannot be read."""
        if not (is_there(self._dir, EVENTS_FILE) or is_there(self._dir, self._older())):
            raise ValueError(
                f"RUN_DIR must have {EVENTS_FILE}, got none in {run_dir}; name the --run-dir of a run"
            )

    def new(self, *, last: bool = False) -> Iterator[Event]:
        """The new events. A line without its end waits for the next call; it is damaged if this call is the `last`."""
        while self._open():
            assert self._file is not None
            is_over = self._is_over()  # before the last line is read
            yield from self._lines(self._file, last=last or is_over)
            if not is_over:
                break
            self.close()
            self._number += 1
        if last:
            self.close()

    def skip(self) -> None:
        """Go to the end of the journal, so that `new` gives what comes after this call."""
        while is_there(self._dir, self._older()):
            self._number += 1
        if self._open():
            assert self._file is not None
            self._file.seek(0, os.SEEK_END)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _older(self) -> str:
        return f"events-{self._number}.jsonl"

    def _open(self) -> bool:
        """Open the file of this number. False if it is not there yet."""
        while self._file is None:
            file = open_file(self._dir, self._older() if is_there(self._dir, self._older()) else EVENTS_FILE)
            if file is None:
                return False
            if is_there(self._dir, self._older()) and not self._is(file, self._older()):
                file.close()  # it was renamed meanwhile, and this is the next one
                continue
            self._file = file
        return True

    def _is_over(self) -> bool:
        """Whether the file was full, and another one goes on."""
        assert self._file is not None
        try:
            return not self._is(self._file, EVENTS_FILE)
        except OSError:
            return False  # renamed at this moment

    def _is(self, file: BinaryIO, name: str) -> bool:
        return os.path.samestat(os.fstat(file.fileno()), (self._dir / name).stat())

    def _lines(self, file: BinaryIO, *, last: bool) -> Iterator[Event]:
        for line in lines_of(file):
            if not line.endswith(b"\n") and not last and len(line) < MOST_OF_LINE:
                file.seek(-len(line), os.SEEK_CUR)
                return
            for event in _events(line):
                self.damaged += event.kind == DAMAGED
                self._check_version(event)
                if self._is_wanted(event):
                    yield event

    def _is_wanted(self, event: Event) -> bool:
        if self._kinds is None:
            return event.kind != DAMAGED and (self._since is None or event.time >= self._since)
        if event.kind not in self._kinds:
            return False
        return event.kind == DAMAGED or self._since is None or event.time >= self._since

    def _check_version(self, event: Event) -> None:
        if event.kind == "journal" and int(event["version"]) > VERSION:
            raise ValueError(
                f"RUN_DIR must have a journal of version {VERSION} or older, got {event['version']} in {self._dir}; "
                "read it with the vime that wrote it, or a newer one"
            )


def _events(line: bytes) -> Iterator[Event]:
    """The events of a line. A line that was cut has the next event behind it."""
    begins = max(line.rfind(_BEGIN), 0)
    if begins:
        yield Event(0.0, "", DAMAGED)
    if (fields := parse(line[begins:])) is None:
        yield Event(0.0, "", DAMAGED)
        return
    moment, source, kind = (fields.pop(name, None) for name in ("time", "source", "kind"))
    is_event = isinstance(source, str) and isinstance(kind, str) and is_number(moment) and 0 <= moment < _LAST
    known = None
    if is_event and kind != DAMAGED:
        known = KINDS[kind].read(fields) if kind in KINDS else fields
    yield Event(0.0, "", DAMAGED) if known is None else Event(float(moment), source, kind, known)


@dataclass(frozen=True)
class Phase:
    """What one process, and one of its devices, did from `begin` to `end` (None: it has not ended), in seconds since
    the epoch."""

    source: str
    device: str
    name: str
    begin: float
    end: float | None
    rollout: int | None


class OpenPhases:
    """The phases of a run that have begun and not ended, while its events are read."""

    def __init__(self) -> None:
        self._running: dict[tuple[str, str, str], list[Event]] = {}
        self._last: dict[str, float] = {}

    def add(self, event: Event) -> list[Phase]:
        """The phases that end with this event. A phase whose process was killed ends with the last event of its source
        before the end, or the next start, of the run."""
        ended: list[Phase] = []
        if event.kind in ("run", "end", "error"):
            running = (begin for begins in self._running.values() for begin in begins)
            ended += [_phase(begin, self._last[begin.source]) for begin in running]
            self._running.clear()
        if event.kind == "journal":  # its time is that of the first write
            return ended
        self._last[event.source] = max(event.time, self._last.get(event.source, 0.0))
        if event.kind not in ("phase_begin", "phase_end"):
            return ended
        key = (event.source, str(event.get("device", "")), str(event["phase"]))
        if event.kind == "phase_begin":
            self._running.setdefault(key, []).append(event)
        elif begins := self._running.get(key):
            same = [begin for begin in begins if begin.get("rollout") == event.get("rollout")]
            begin = same[-1] if same else begins[-1]
            begins.remove(begin)
            ended.append(_phase(begin, event.time))
        return ended

    def going_on(self) -> list[Phase]:
        """By their begin."""
        running = (_phase(begin, None) for begins in self._running.values() for begin in begins)
        return sorted(running, key=lambda phase: phase.begin)


def phases(events: Iterable[Event]) -> list[Phase]:
    """The phases of a run by their begin; without an end if they go on."""
    running = OpenPhases()
    found = [phase for event in events for phase in running.add(event)]
    return sorted([*found, *running.going_on()], key=lambda phase: phase.begin)


def _phase(begin: Event, end: float | None) -> Phase:
    device, rollout = str(begin.get("device", "")), begin.get("rollout")
    return Phase(begin.source, device, str(begin["phase"]), begin.time, end, rollout)
