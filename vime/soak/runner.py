"""Runs the user's command to its last step, causes the planned faults, and starts the command again after an end."""

from __future__ import annotations

import contextlib
import random
import subprocess
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from vime.pool.process import tail
from vime.soak.faults import FAULTS, Target
from vime.soak.growth import Reading, read_parts
from vime.soak.parts import Descendants
from vime.soak.plan import Planned, last_step
from vime.soak.progress import Progress, ProgressReader
from vime.soak.proxy import Proxy

LATE_END_S = 60.0
"""A run that ends within this number of seconds after the last fault has ended because of the fault."""
LOOK_S = 0.25
MOST_RESTARTS = 2
"""Number of starts after one fault. A run that ends more often has another error."""
_LOG_LINES = 15


@dataclass
class Strike:
    """One fault after `step` steps of the soak. `recovery_s` is None until the recovery. `restarted` is the time at
    which the command started again, for the `restarts`-th time, or None. `replies` is the number of replies that the
    proxy held, cut or lost."""

    kind: str
    step: int
    time: float
    replies_before: int = 0
    recovery_s: float | None = None
    restarted: float | None = None
    restarts: int = 0
    replies: int = 0


@dataclass(frozen=True)
class Job:
    """The run of a soak. `command` has its words. `resume` returns the words that start it again, or
    None while there is no checkpoint. `resuming` are the faults that may end the run. `first` is its first rollout."""

    command: Sequence[str]
    resume: Callable[[], list[str] | None]
    resuming: Collection[str]
    run_dir: Path
    log: Path
    first: int
    steps: int
    staleness: int
    stall_s: float


@dataclass
class Observed:
    """The observations of a soak."""

    strikes: list[Strike] = field(default_factory=list)
    readings: list[Reading] = field(default_factory=list)
    starts: int = 0


class BrokenRunError(RuntimeError):
    """The run ended without a fault, or made no more steps."""


class Runner:
    """Runs to the last step, and causes each fault of the plan after its step was reached."""

    def __init__(
        self, job: Job, plan: list[Planned], started: Descendants, proxy: Proxy | None, seed: int
    ) -> None:
        self.job, self.plan, self.observed = job, plan, Observed()
        self._started, self._proxy, self._chance = started, proxy, random.Random(seed)
        self._reader = ProgressReader(job.run_dir)
        self._waiting: Strike | None = None
        self._ending: tuple[float, Callable[[], None]] | None = None
        """The time at which the present fault ends, and the function that ends it."""
        self._run = self._start(job.command)

    def finish(self) -> None:
        """Returns when the run has trained its last step. Raises BrokenRunError if it never will."""
        moved, seen = time.time(), 0
        while True:
            time.sleep(LOOK_S)
            code = self._run.poll()
            progress = self._reader.read()
            if len(progress.steps) > seen:
                seen, moved = len(progress.steps), time.time()
                self.observed.readings += read_parts(self._started, self._done(progress))
            self._end_fault(time.time())
            self._note_recovery(progress)
            if code is not None:
                if self._done(progress) >= self.job.steps and code == 0:
                    return
                self._start_again(code)
                moved = time.time()
            elif self._is_due(progress):
                self._strike(self.plan[0])
            if (quiet_s := time.time() - moved) > self.job.stall_s:
                raise BrokenRunError(
                    f"no step for {quiet_s:.0f} s{self._after()}; look at {self.job.log}, or raise --stall-s"
                )

    def close(self) -> None:
        """Ends a fault that has not ended, and closes the journal."""
        self._end_fault(float("inf"))
        self._reader.close()

    def _start(self, words: Sequence[str]) -> subprocess.Popen[bytes]:
        self.observed.starts += 1
        with self.job.log.open("ab") as log:
            return subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _done(self, progress: Progress) -> int:
        """Returns the number of trained steps of the soak."""
        return max(0, progress.trained - self.job.first)

    def _is_due(self, progress: Progress) -> bool:
        """Returns whether the next fault of the plan may begin. Faults do not overlap. A fault that may end the run
        waits for the first checkpoint."""
        if self._waiting is not None or not self.plan or not progress.steps:
            return False
        done, planned = self._done(progress), self.plan[0]
        if not planned.step <= done <= last_step(self.job.steps, self.job.staleness):
            return False
        if planned.kind not in self.job.resuming:
            return True
        with contextlib.suppress(ValueError):  # a checkpoint that is being written may look incomplete
            return self.job.resume() is not None
        return False

    def _strike(self, planned: Planned) -> None:
        time.sleep(self._chance.uniform(0.0, 0.5))  # at any moment of a step
        fault, driver = FAULTS[planned.kind], psutil.Process(self._run.pid)
        target = Target(self.job.run_dir, self._started, driver, self._proxy, self._chance)
        hit = self._hit
        now = time.time()
        if not fault.begin(target):
            return  # The process is starting. The next look tries again.
        self.plan.pop(0)
        self._waiting = Strike(planned.kind, planned.step, now, replies_before=hit)
        self.observed.strikes.append(self._waiting)
        self._ending = now + fault.holds_s, lambda: fault.end(target)

    @property
    def _hit(self) -> int:
        return 0 if self._proxy is None else self._proxy.hit

    def _end_fault(self, now: float) -> None:
        if self._ending and now >= self._ending[0]:
            self._ending[1]()
            self._ending = None

    def _note_recovery(self, progress: Progress) -> None:
        if (strike := self._waiting) is None or self._ending:
            return
        if FAULTS[strike.kind].ends_run and not strike.restarted:
            return  # After the death of gcs_server, a run continues for seconds.
        end = progress.recovered(strike.restarted or strike.time, self.job.staleness)
        if end is None:
            return
        strike.recovery_s = end - strike.time
        strike.replies = self._hit - strike.replies_before
        restarted = ", started again" if strike.restarted else ""
        print(f"step {strike.step}: {strike.kind}: {strike.recovery_s:.1f} s{restarted}", flush=True)
        self._waiting = None

    def _start_again(self, code: int) -> None:
        """Starts the run again, but only after a fault. A run that ends without a fault has failed."""
        self._end_fault(float("inf"))
        last = self.observed.strikes[-1] if self.observed.strikes else None
        if last is None or (self._waiting is None and time.time() - last.time > LATE_END_S):
            raise BrokenRunError(
                f"the run ended with exit code {code} without a fault; look at {self._last_lines()}"
            )
        if last.restarts == MOST_RESTARTS:
            raise BrokenRunError(
                f"the run could not start again{self._after()}; look at {self._last_lines()}"
            )
        words = self.job.resume()
        if words is None:
            raise BrokenRunError(
                f"the run ended{self._after()} before its first checkpoint; lower --save-interval"
            )
        self._waiting = last
        last.recovery_s, last.restarted = None, time.time()
        last.restarts += 1
        self._run = self._start(words)

    def _after(self) -> str:
        waiting = self._waiting
        return "" if waiting is None else f" after the fault {waiting.kind} at step {waiting.step}"

    def _last_lines(self) -> str:
        return f"the last lines of {self.job.log}:\n{tail(str(self.job.log), _LOG_LINES)}"
