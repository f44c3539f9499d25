"""Measures the memory of a run by phase: a thread of the driver samples the cards and the host twice a second.

Each phase's largest values go to the journal, as events of the kind `memory`. If the host comes near its limit, the
watch ends the run with an explanatory error, before the kernel or Ray kills a process without an error.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, TracebackType

from slime.cluster.watchdog import descendants
from slime.memory.cards import Cards
from slime.memory.host import RAY_THRESHOLD, HostMemory, host_memory
from slime.memory.peaks import MemoryReading, Peaks
from slime.memory.processes import OTHER, find_roles, process_memory, proportional
from slime.tracking.events import Events
from slime.tracking.phases import FIRST_WEIGHTS, GENERATING, LOADING, PHASE_OF_TIMER

_EVERY_S = 0.5
_ROLES_EVERY, _WALK_EVERY, _WRITE_EVERY = 16, 8, 20
"""Number of samples between two lists of processes, between two walks, and between two records of a running phase.

The kernel needs a millisecond or more for a list of all processes, and the same time for a walk through a process's
pages.
"""
_GROWN = 1.1
"""Growth factor after which a process is walked again for its proportional size."""


class HostMemoryError(RuntimeError):
    """The processes of a run used nearly all memory of the host."""


class MemoryWatch:
    """Measures memory in a context in the driver's main thread, from the start of the run to its end.

    `explain` makes the text of the error from the measurements. Without `explain`, the watch does not act on a full
    host. `root` replaces `/` for the files that describe the host.
    """

    def __init__(
        self,
        run_dir: str,
        explain: Callable[[Peaks, HostMemory], str] | None = None,
        *,
        threshold: float = RAY_THRESHOLD,
        root: Path = Path("/"),
        every_s: float = _EVERY_S,
    ) -> None:
        self._logs, self._root, self._every_s = Path(run_dir) / "logs", root, every_s
        self._explain, self._threshold = explain, threshold
        self._events = Events("memory", run_dir)
        self._lock, self._wake, self._closing = threading.Lock(), threading.Event(), threading.Event()
        self._inside: list[str] = []
        self._usual = LOADING
        self._rollout: int | None = None
        self._now, self._ended = Peaks(LOADING), list[Peaks]()
        self._roles: dict[int, str] = {}
        self._walked: dict[int, tuple[int, int]] = {}
        self._thread = threading.Thread(target=self._run, name="memory-watch", daemon=True)
        self._full: str | None = None

    def __enter__(self) -> MemoryWatch:
        self._before = signal.signal(signal.SIGUSR2, self._raise)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing.set()
        self._wake.set()
        self._thread.join()
        signal.signal(signal.SIGUSR2, self._before)
        self._events.close()
        if self._full is not None and isinstance(error, SystemError):
            # Ray's compiled code drops an exception of a signal handler, and raises a SystemError instead.
            raise HostMemoryError(self._full) from error

    @property
    def now(self) -> Peaks:
        """Returns the peaks of the present phase."""
        with self._lock:
            return self._now

    @property
    def roles(self) -> dict[int, str]:
        """Returns process id -> role from the last list."""
        return dict(self._roles)

    def set_rollout(self, rollout: int) -> None:
        self._rollout = rollout

    def observe(self, timer: str, begins: bool) -> None:
        """Records the begin or the end of a timer of the driver."""
        if (phase := PHASE_OF_TIMER.get(timer)) is not None:
            (self._begin if begins else self._end)(phase)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Records a phase for the block. After the first weights, GENERATING is the phase between two other phases."""
        self._begin(name)
        try:
            yield
        finally:
            if name == FIRST_WEIGHTS:
                self._usual = GENERATING
            self._end(name)

    def _begin(self, phase: str) -> None:
        with self._lock:
            self._inside.append(phase)
            self._change()

    def _end(self, phase: str) -> None:
        with self._lock:
            self._inside.remove(phase)
            self._change()

    def _change(self) -> None:
        phase = self._inside[-1] if self._inside else self._usual
        if phase == self._now.phase and self._rollout == self._now.rollout:
            return
        if self._now.samples:
            self._ended.append(self._now)
        self._now = Peaks(phase, self._rollout, before=self._now.before)
        self._wake.set()  # takes a sample at the begin of a phase that is shorter than the sampling interval

    def _run(self) -> None:
        cards, count = Cards(), 0
        while not self._closing.is_set():
            if count % _ROLES_EVERY == 0:
                started = [process.pid for process in descendants(os.getpid())]
                self._roles = find_roles(self._logs, os.getpid(), started)
            sample = self._sample(cards, walks=count % _WALK_EVERY == 0)
            with self._lock:
                if count == 0 and sample.host is not None:
                    self._now.before = sample.host.used
                self._now.add(sample)
                ended, self._ended = self._ended, []
            count += 1
            self._write(ended, going_on=count % _WRITE_EVERY == 0)
            self._check(sample.host)
            self._wake.wait(self._every_s)
            self._wake.clear()
        self._write(self._ended, going_on=True)

    def _sample(self, cards: Cards, *, walks: bool) -> MemoryReading:
        found = {pid: process_memory(pid) for pid in self._roles}
        sizes = {pid: memory for pid, memory in found.items() if memory is not None}
        return MemoryReading(
            cards.read(processes=True),
            host_memory(self._root),
            _used_shared_memory(),
            sizes,
            self._roles,
            self._proportional({pid: memory.resident for pid, memory in sizes.items()}, walks=walks),
        )

    def _proportional(self, resident: dict[int, int], *, walks: bool) -> dict[str, int]:
        """Returns role -> proportional size. With `walks`, the process that has grown most is walked."""
        grown = [pid for pid, size in resident.items() if size > _GROWN * self._walked.get(pid, (0, 0))[0]]
        if grown and walks:
            pid = max(grown, key=lambda one: resident[one] - self._walked.get(one, (0, 0))[0])
            if (size := proportional(pid)) is not None:
                self._walked[pid] = resident[pid], size
        found: dict[str, int] = {}
        for pid in resident:
            if pid in self._walked:
                role = self._roles.get(pid, OTHER)
                found[role] = found.get(role, 0) + self._walked[pid][1]
        return found

    def _write(self, ended: list[Peaks], *, going_on: bool) -> None:
        for peaks in [*ended, *([self._now] if going_on and self._now.samples else [])]:
            self._events.add("memory", **peaks.fields())

    def _check(self, host: HostMemory | None) -> None:
        """Ends the run in the main thread if the host is nearly full. Page cache does not count."""
        if self._explain is None or self._full is not None or host is None or host.share < self._threshold:
            return
        self._full = self._explain(self.now, host)
        self._write([], going_on=True)
        main = threading.main_thread().ident
        assert main is not None
        signal.pthread_kill(main, signal.SIGUSR2)

    def _raise(self, number: int, frame: FrameType | None) -> None:
        if self._full is not None:
            raise HostMemoryError(self._full)


def _used_shared_memory() -> int:
    try:
        found = os.statvfs("/dev/shm")
    except OSError:
        return 0
    return (found.f_blocks - found.f_bfree) * found.f_frsize
