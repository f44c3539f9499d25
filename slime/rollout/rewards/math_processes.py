"""This module owns the processes in which math-verify and SymPy compare two answers, and the limits on these processes.

math-verify's timeouts use SIGALRM. They fail outside the main thread and have no effect inside a long big-integer
operation. So each comparison runs in a child process with limits on CPU time and memory, and no answer can hang the
run. If a comparison exceeds a limit, the answers count as different, with a warning.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from slime.config.child_environment import without_secrets

logger = logging.getLogger(__name__)

_START_TIMEOUT_S = 120.0


CPU_S = 5
"""Limit on SymPy's CPU time for one answer, in seconds."""
_MOST_COMPARISONS, _MOST_NESTED = 5000, 20
"""Limits for an answer: the number of comparisons of two parts, and the depth of parts inside parts."""


class TooMuch(Exception):
    """The comparison of an answer exceeds a limit."""


class Work:
    """Counts the work of comparing one answer. An answer's parts are compared recursively."""

    def __init__(self) -> None:
        self._comparisons = self._nested = 0
        self._cpu_s = 0.0

    @contextlib.contextmanager
    def one_more(self) -> Iterator[None]:
        """Counts a comparison of two parts. TooMuch above the limits."""
        self._comparisons += 1
        self._nested += 1
        if self._comparisons > _MOST_COMPARISONS or self._nested > _MOST_NESTED:
            raise TooMuch("has too many parts")
        yield
        self._nested -= 1

    def result(self, compared: Compared) -> bool:
        """Returns True if the parts are equal. TooMuch if SymPy had no result, or the parts took too long together."""
        self._cpu_s += compared.cpu_s
        if compared.cause or self._cpu_s > CPU_S:
            raise TooMuch(compared.cause or f"takes more than {CPU_S} s of CPU time")
        return compared.equal


@dataclass(frozen=True)
class Compared:
    """The verdict on two answers, the child's CPU time in seconds, and the reason for a missing result, or ""."""

    equal: bool
    cpu_s: float
    cause: str = ""


class MathChecker:
    """At most `workers` child processes. Each starts when it is first needed and compares one pair at a time.

    A comparison ends after `cpu_limit_s` (whole seconds) of the child's CPU time. `wall_limit_s` covers a
    machine so loaded that the child gets no CPU. Thread-safe.
    """

    def __init__(self, workers: int, cpu_limit_s: int = CPU_S, wall_limit_s: float = 60.0) -> None:
        self.cpu_limit_s = cpu_limit_s
        self.wall_limit_s = wall_limit_s
        self._slots = threading.BoundedSemaphore(workers)
        self._idle: list[_Worker] = []

    def equal(self, gold: str, answer: str, *, decimal: bool = False) -> bool:
        """Returns SymPy's verdict. Without a verdict, logs a warning and returns False."""
        compared = self.compare(gold, answer, decimal=decimal)
        if compared.cause:
            logger.warning(
                "answer %.80r counts as different from %.80r: the comparison %s", answer, gold, compared.cause
            )
        return compared.equal

    def compare(self, gold: str, answer: str, *, decimal: bool = False) -> Compared:
        """Returns SymPy's verdict; with `decimal`, to a relative 1e-6. If the comparison exceeds a limit or ends its
        process twice, the verdict is "different", with the cause.

        Raises RuntimeError if the child cannot start (math-verify is not installed).
        """
        with self._slots:
            for attempt in (1, 2):
                worker = self._take()
                verdict = worker.ask(gold, answer, decimal, self.wall_limit_s)
                if verdict is not None:
                    self._idle.append(worker)
                    return verdict
                cpu_s = float(self.cpu_limit_s) if worker.hit_limit else 0.0
                reason = worker.describe_death()
                # Try again if the answer may not have caused the child's end (an out-of-memory kill).
                if attempt == 2 or worker.hit_limit:
                    break
        return Compared(False, cpu_s, reason)

    def close(self) -> None:
        while self._idle:
            self._idle.pop().reap()

    def _take(self) -> _Worker:
        while self._idle:
            worker = self._idle.pop()  # the worker that was used last
            if worker.process.poll() is None:
                return worker
            worker.reap()
        return _Worker(self.cpu_limit_s)


class _Worker:
    """A child process and its pipes."""

    def __init__(self, cpu_limit_s: int) -> None:
        # -P keeps this folder off the child's sys.path. In a new session, the child gets no Ctrl-C of a terminal.
        command = [sys.executable, "-P", str(Path(__file__).with_name("math_worker.py")), str(cpu_limit_s)]
        self._cpu_limit_s = cpu_limit_s
        self._timed_out = False
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            env=without_secrets(),
        )
        assert self.process.stdin is not None and self.process.stdout is not None
        self._requests, self._replies = self.process.stdin, self.process.stdout
        if self._read_line(_START_TIMEOUT_S) != b"ready":
            self.reap()
            raise RuntimeError(
                "the process that compares mathematical answers did not start (exit code "
                f"{self.process.returncode}, its error is printed above); is math-verify installed?"
            )

    def ask(self, gold: str, answer: str, decimal: bool, wall_limit_s: float) -> Compared | None:
        """Returns SymPy's verdict, or None if the child ended without a verdict."""
        try:
            self._requests.write(json.dumps([gold, answer, decimal]).encode() + b"\n")
            self._requests.flush()
        except BrokenPipeError:
            reply = b""
        else:
            reply = self._read_line(wall_limit_s)
        if reply:
            equal, cpu_s = reply.split()
            return Compared(equal == b"1", float(cpu_s))
        self.reap()
        return None

    @property
    def hit_limit(self) -> bool:
        return self._timed_out or self.process.returncode == -signal.SIGXCPU

    def describe_death(self) -> str:
        if self._timed_out:
            return "got too little CPU time on this machine to end"
        if self.hit_limit:
            return f"takes more than {self._cpu_limit_s} s of CPU time"
        return f"ended its process with exit code {self.process.returncode}"

    def reap(self) -> None:
        """Ends the child by closing its input, so that its exit code shows the cause."""
        with contextlib.suppress(BrokenPipeError):
            self._requests.close()
        try:
            self.process.wait(0 if self._timed_out else 2)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._replies.close()

    def _read_line(self, timeout_s: float) -> bytes:
        """Returns a line without its newline, or b"" if the child has ended or is silent for `timeout_s` seconds."""
        end_s = time.monotonic() + timeout_s
        poller = select.poll()
        poller.register(self._replies, select.POLLIN)
        line = b""
        while not line.endswith(b"\n"):
            if not poller.poll(max(0.0, end_s - time.monotonic()) * 1000):
                self._timed_out = True
                return b""
            chunk = os.read(self._replies.fileno(), 4096)
            if not chunk:
                return b""
            line += chunk
        return line.strip()
