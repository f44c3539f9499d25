"""Writes events.jsonl of a run, the journal: one JSON object per line, appended by every process.

`slime.tracking.kinds` defines the kinds of events, and `slime.tracking.journal` reads them.
"""

from __future__ import annotations

import atexit
import fcntl
import json
import logging
import os
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from slime.system.disk_space import DiskSpaceGuard
from slime.system.soft_lock import MISSING
from slime.tracking.kinds import EVENTS_FILE, KINDS, OLDER, PHASES, VERSION

logger = logging.getLogger(__name__)
FILE_BYTES = 64 * 2**20
"""Size in bytes at which a file is renamed to events-N.jsonl, and a new file begins."""
_EVERY_S = 0.5
_MOST_WAITING = 10_000
"""Maximum number of events that wait while the disk is full."""


class Events:
    """Appends to the file in `run_dir`, or writes nothing without one. The class is thread-safe.

    Events of durable kinds are in the file when `add` returns. Other events wait in memory, until a thread writes them
    every half second, or until the next durable event of this object. So the events of an object stay in order. A
    killed process loses its waiting events.

    A write appends whole lines, with the file locked against other processes. On a file system without flock, only the
    append mode keeps lines separate, and no new file begins. A killed process or a full disk may leave a cut line, to
    which the next line is appended.
    """

    def __init__(self, source: str, run_dir: str | None, file_bytes: int = FILE_BYTES) -> None:
        self._source, self._file_bytes = source, file_bytes
        self._path = Path(run_dir) / EVENTS_FILE if run_dir else None
        self._file = self._folder = -1
        self._waiting: list[bytes] = []
        self._lost = 0
        self._of_waiting, self._of_file = threading.Lock(), threading.Lock()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    def add(self, kind: str, **fields: object) -> None:
        """Records an event now. For a durable kind, raises ValueError if the disk is full, or if the run directory no
        longer exists."""
        if self._path is None:
            return
        wanted = KINDS[kind]
        if not wanted.required <= fields.keys() <= wanted.allowed:
            raise ValueError(
                f"an event {kind} must have the fields {wanted.fields}, got {sorted(fields)}; see slime.tracking.kinds"
            )
        line = _line(self._source, kind, fields)
        if wanted.durable:
            self._flush(line)
            return
        with self._of_waiting:
            self._waiting.append(line)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="events", daemon=True)
                self._thread.start()
                atexit.register(self.close)

    @contextmanager
    def phase(self, name: str, **fields: object) -> Iterator[None]:
        """Records the begin and the end of a block. `fields` are device and rollout."""
        self.add("phase_begin", phase=name, **fields)
        began = time.perf_counter()
        try:
            yield
        finally:
            self.add("phase_end", phase=name, seconds=round(time.perf_counter() - began, 4), **fields)

    def close(self) -> None:
        """Writes the waiting events. A later `add` opens the file again."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._closing.set()
            thread.join()
            self._closing.clear()
            atexit.unregister(self.close)
        self._flush_quietly()
        with self._of_file:
            self._close_file()
            self._close_folder()

    def _run(self) -> None:
        while not self._closing.wait(_EVERY_S):
            self._flush_quietly()

    def _flush_quietly(self) -> None:
        """Writes the waiting events without an error. The next durable event raises the error of a full disk, which
        ends the run."""
        try:
            self._flush()
        except (OSError, ValueError) as error:
            with self._of_waiting:
                surplus = max(0, len(self._waiting) - _MOST_WAITING)
                del self._waiting[:surplus]
                first, self._lost = self._lost == 0 and surplus > 0, self._lost + surplus
            if first:
                logger.warning("events of the run are lost: %s", error)

    def _flush(self, durable: bytes = b"") -> None:
        """Writes the waiting events, and then `durable`. Events that could not be written wait again."""
        with self._of_file:
            with self._of_waiting:
                lines, self._waiting = self._waiting, []
            data = b"".join([*lines, durable])
            if not data:
                return
            assert self._path is not None
            written = [0]
            try:
                with DiskSpaceGuard("--run-dir", self._path.parent, "the run's events"):
                    self._append(data, written)
            except BaseException:
                with self._of_waiting:
                    self._waiting[:0] = lines[data.count(b"\n", 0, written[0]) :]
                raise

    def _append(self, data: bytes, written: list[int]) -> None:
        """Appends `data`. `written[0]` is the number of bytes of `data` in the file, even if the disk becomes full."""
        while True:
            self._open_file()
            with _locked(self._file) as is_locked:
                if not self._is_current():
                    self._close_file()
                    continue
                size = os.fstat(self._file).st_size
                if is_locked and size >= self._file_bytes:
                    self._begin_new_file()
                    continue
                if size == 0:
                    _write_all(self._file, _line(self._source, "journal", {"version": VERSION}))
                while written[0] < len(data):
                    # The write that fills the disk writes a part without an error; the next write fails.
                    written[0] += os.write(self._file, data[written[0] :])
                return

    def _open_file(self) -> None:
        if self._file < 0:
            assert self._path is not None
            if self._folder < 0:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                # The folder stays open, so that its inode number cannot be reused.
                self._folder = os.open(self._path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            self._require_folder()
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC
            self._file = os.open(self._path, flags, 0o644)

    def _require_folder(self) -> None:
        """Raises ValueError if the run directory was removed or replaced."""
        assert self._path is not None
        try:
            if os.path.samestat(os.fstat(self._folder), self._path.parent.stat()):
                return
        except FileNotFoundError:
            pass
        raise ValueError(
            f"--run-dir must exist while its run is active, got {self._path.parent}, which was removed or replaced; "
            "start the run again, with --load to resume"
        )

    def _close_file(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _close_folder(self) -> None:
        if self._folder >= 0:
            os.close(self._folder)
            self._folder = -1

    def _is_current(self) -> bool:
        """Returns False if another process has begun a new file."""
        assert self._path is not None
        try:
            return os.path.samestat(os.fstat(self._file), self._path.stat())
        except FileNotFoundError:
            return False

    def _begin_new_file(self) -> None:
        assert self._path is not None
        names = (path.name for path in self._path.parent.glob(OLDER))
        numbers = [int(match[1]) for name in names if (match := re.fullmatch(r"events-(\d+)\.jsonl", name))]
        self._path.rename(self._path.with_name(f"events-{max(numbers, default=0) + 1}.jsonl"))
        self._close_file()


class Spans:
    """Observer of a `Timers`. It records the spans that are phases of a run, with the rollout that was set here."""

    def __init__(self, events: Events, device: str = "") -> None:
        self._events, self._began = events, dict[str, float]()
        self._fields: dict[str, object] = {"device": device} if device else {}

    def set_rollout(self, rollout: int) -> None:
        self._fields["rollout"] = rollout

    def __call__(self, name: str, begins: bool) -> None:
        if (phase := PHASES.get(name)) is None:
            return
        if begins:
            self._began[name] = time.perf_counter()
            self._events.add("phase_begin", phase=phase, **self._fields)
        else:
            seconds = round(time.perf_counter() - self._began.pop(name), 4)
            self._events.add("phase_end", phase=phase, seconds=seconds, **self._fields)


def _line(source: str, kind: str, fields: dict[str, object]) -> bytes:
    return json.dumps({"time": time.time(), "source": source, "kind": kind, **fields}).encode() + b"\n"


def _write_all(file: int, data: bytes) -> None:
    while data:
        data = data[os.write(file, data) :]


@contextmanager
def _locked(file: int) -> Iterator[bool]:
    """Holds the lock of an open file. Yields False on a file system without locks. The lock ends with the process."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
    except OSError as error:
        if error.errno not in MISSING:
            raise
        yield False
        return
    copy = os.dup(file)  # `file` may be closed in the block
    try:
        yield True
    finally:
        fcntl.flock(copy, fcntl.LOCK_UN)
        os.close(copy)
