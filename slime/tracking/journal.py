"""Reads the journal of a run, events.jsonl, while the run is running or after its end.

    read_events(run_dir, kinds=("step",), since=time)    the events so far, in the order of the files
    follow(run_dir)                                      the events so far, and then each new event
    phases(read_events(run_dir))                         the phases of each process, with begin and end
    slime.tracking.run_summary.run_summary(run_dir)      the state of the run
    slime.tracking.samples.read_samples(run_dir, 3)      samples of a rollout

Events of a process are in order. Events of several processes may be half a second out of order; `time` has the exact
time.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from slime.tracking.kinds import DAMAGED, EVENTS_FILE, KINDS, VERSION
from slime.tracking.run_files import MOST_OF_LINE, Line, is_number, is_there, open_file, parse, read_lines

_BEGIN = b'{"time": '
"""First bytes of every line. No field of an event contains them, because quotes in text are escaped."""
_LAST = 1e11
"""Seconds since the epoch that are too large for the time of a run."""


@dataclass(frozen=True)
class Event:
    """One event. `event["rollout"]` is a field; `slime.tracking.kinds` lists the kinds' fields."""

    time: float
    """Seconds since the epoch."""
    source: str
    """Process that wrote the event: driver, rollout, engines, trainer-0, ..."""
    kind: str
    fields: Line = field(default_factory=dict)

    def __getitem__(self, name: str) -> Any:
        return self.fields[name]

    def get(self, name: str, default: object = None) -> Any:
        return self.fields.get(name, default)


def read_events(
    run_dir: Path, kinds: Collection[str] | None = None, since: float | None = None
) -> Iterator[Event]:
    """Yields the events of a run so far: those of `kinds`, from time `since` on.

    Lines that a killed process or a full disk has cut, and lines that match no kind in `slime.tracking.kinds`, are left
    out, unless `kinds` has `damaged`. Files of older versions are read, even without a first line. Raises ValueError
    for a directory without a journal, for an unreadable one, and for a journal of a newer version.
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
    """Yields the events so far, and then each new event. Checks for new events every `every_s` seconds, until
    `stop()`."""
    tail = Tail(run_dir, kinds, since)
    while True:
        yield from tail.new()
        if stop():
            return
        time.sleep(every_s)


class Tail:
    """A position in the journal of a run. Each call of `new` yields the events after the previous call."""

    def __init__(
        self, run_dir: Path, kinds: Collection[str] | None = None, since: float | None = None
    ) -> None:
        self._dir, self._kinds, self._since = Path(run_dir), kinds, since
        self._file: BinaryIO | None = None
        self._number = 1
        self.damaged = 0
        """Number of unreadable lines so far."""
        if not (is_there(self._dir, EVENTS_FILE) or is_there(self._dir, self._older())):
            raise ValueError(
                f"RUN_DIR must have {EVENTS_FILE}, got none in {run_dir}; name the --run-dir of a run"
            )

    def new(self, *, last: bool = False) -> Iterator[Event]:
        """Yields the new events. A line without its end waits for the next call; it is damaged if this call is the
        `last`."""
        while self._open():
            assert self._file is not None
            is_over = self._is_over()  # checked before the last line is read
            yield from self._lines(self._file, last=last or is_over)
            if not is_over:
                break
            self.close()
            self._number += 1
        if last:
            self.close()

    def skip(self) -> None:
        """Moves to the end of the journal, so that `new` yields only later events."""
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
        """Opens the file with this number. Returns False if it does not exist yet."""
        while self._file is None:
            file = open_file(self._dir, self._older() if is_there(self._dir, self._older()) else EVENTS_FILE)
            if file is None:
                return False
            if is_there(self._dir, self._older()) and not self._is(file, self._older()):
                file.close()  # the file was renamed in between; this is the next file
                continue
            self._file = file
        return True

    def _is_over(self) -> bool:
        """Returns True if the file was full, and the journal continues in another file."""
        assert self._file is not None
        try:
            return not self._is(self._file, EVENTS_FILE)
        except OSError:
            return False  # renamed at this moment

    def _is(self, file: BinaryIO, name: str) -> bool:
        return os.path.samestat(os.fstat(file.fileno()), (self._dir / name).stat())

    def _lines(self, file: BinaryIO, *, last: bool) -> Iterator[Event]:
        for line in read_lines(file):
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
    """Yields the events of a line. In a cut line, the next event follows the cut one."""
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
    """A phase of a process, or of a device of the process, from `begin` to `end` in seconds since the epoch. `end` is
    None while the phase is running."""

    source: str
    device: str
    name: str
    begin: float
    end: float | None
    rollout: int | None


_NO_RANKS = ("driver", "rollout", "engines", "memory")
"""Sources of events that are no trainer ranks."""
_ENDING = ("run", "end", "error", "trainer_lost", "manager_lost")
"""Kinds of events after which processes are gone."""


class OpenPhases:
    """Tracks the phases of a run that have begun and not ended, while its events are read."""

    def __init__(self) -> None:
        self._running: dict[tuple[str, str, str], list[Event]] = {}
        self._last: dict[str, float] = {}

    def add(self, event: Event) -> list[Phase]:
        """Returns the phases that end with this event.

        A phase of a killed process ends with the last event of its source before the run's end or next start, or
        before the loss of the trainer or of the rollout manager.
        """
        ended: list[Phase] = []
        if event.kind in _ENDING:
            lost = [key for key in self._running if _is_gone(event.kind, key[0])]
            running = (begin for key in lost for begin in self._running.pop(key))
            ended += [_phase(begin, self._last[begin.source]) for begin in running]
        if event.kind == "journal":  # its time is the time of the first write
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
        """Returns the running phases, sorted by begin."""
        running = (_phase(begin, None) for begins in self._running.values() for begin in begins)
        return sorted(running, key=lambda phase: phase.begin)


def _is_gone(kind: str, source: str) -> bool:
    """Returns True if the process `source` is gone after an event of this kind."""
    if kind == "manager_lost":
        return source == "rollout"
    return kind != "trainer_lost" or source not in _NO_RANKS


def phases(events: Iterable[Event]) -> list[Phase]:
    """Returns the phases of a run, sorted by begin. A running phase has no end."""
    running = OpenPhases()
    found = [phase for event in events for phase in running.add(event)]
    return sorted([*found, *running.going_on()], key=lambda phase: phase.begin)


def _phase(begin: Event, end: float | None) -> Phase:
    device, rollout = str(begin.get("device", "")), begin.get("rollout")
    return Phase(begin.source, device, str(begin["phase"]), begin.time, end, rollout)
