"""Whether two mathematical answers are equal. Owns the processes that run math-verify, and their limits.

math-verify's own timeouts use SIGALRM. They fail outside the main thread and have no effect inside a long
big-integer operation. So each comparison runs in a child process with limits on CPU time and memory, and no
answer can hang the run. If a comparison exceeds a limit, the answers count as different, with a warning.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import logging
import os
import re
import select
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from slime.rollout.rewards.numeric import canonical_number

logger = logging.getLogger(__name__)

_START_TIMEOUT_S = 120.0

_TEXT = re.compile(r"\\text\{(.*)\}", re.DOTALL)
_BRACKETS = {"()", "[]", "(]", "[)"}
_SHORT_FRACTION = re.compile(r"frac([0-9])([0-9])")
_DRESS = re.compile(
    r"\\text\{[^{}]*\}(?:\^\{?[0-9]\}?)?|\s|\\[!,;: ]|\$|\\(?:left|right)(?![a-z])|\^\{?\\circ\}?"
)
_FRACTION = re.compile(r"[-+]?(?:\\frac\{([-+]?[0-9]+)\}\{([-+]?[0-9]+)\}|([0-9]+)/([0-9]+))")
_WHOLE = re.compile(r"^[-+]?[0-9]{1,3}(?:(?:,|\{,\})?[0-9]{3})*(?:\.0*)?$|^[-+]?[0-9]+(?:\.0*)?$")
_COMPUTED = re.compile(r"\\(?:frac|sqrt|cdot|times|binom)|[0-9)}][-+*/^!]")


def same_answer(answer: str, gold: str) -> bool:
    """Whether `answer` equals `gold` as mathematics. Compares text, then plain numbers, then with math-verify.

    Any thread may call this. It blocks up to the worker's limits, so do not call it on the event loop. Integers
    are compared exactly, other numbers to 6 decimals (math-verify). Deterministic, because the limit is CPU
    time, not wall time.
    """
    answer, gold = answer.strip(), gold.strip()
    if not answer or not gold:
        return False
    if _unwrapped(answer) == _unwrapped(gold):
        return True
    numbers = canonical_number(answer), canonical_number(gold)
    if None not in numbers:
        if numbers[0] == numbers[1]:
            return True
        if "." not in answer + gold and "%" not in answer + gold:
            return False
    return not _of_another_form(answer, gold) and _ask(gold, answer)


def _unwrapped(text: str) -> str:
    """The text without `\\text{}` around all of it."""
    while (inner := _TEXT.fullmatch(text)) is not None:
        text = inner[1].strip()
    return text


def _of_another_form(answer: str, gold: str) -> bool:
    """Whether the answer does not have the form that the label asks for, which slime's graders refuse too: brackets of
    another kind, a fraction that is not the label's, or something to compute for a whole number (or the reverse)."""
    answer, gold = _bare(answer), _bare(gold)
    if "," in gold and gold[:1] + gold[-1:] in _BRACKETS and gold[:1] + gold[-1:] != answer[:1] + answer[-1:]:
        return True
    parts = _FRACTION.fullmatch(answer), _FRACTION.fullmatch(gold)
    if parts[0] and parts[1]:
        return _parts(parts[0]) != _parts(parts[1])
    whole = _WHOLE.search(answer) is not None, _WHOLE.search(gold) is not None
    computed = _COMPUTED.search(answer) is not None, _COMPUTED.search(gold) is not None
    return (whole[1] and computed[0]) or (whole[0] and computed[1])


def _bare(text: str) -> str:
    """The text without white space, math mode, units, degrees and sizes of brackets, with fractions in one form."""
    text = _DRESS.sub("", text).replace("dfrac", "frac").replace("tfrac", "frac")
    return _SHORT_FRACTION.sub(r"frac{\1}{\2}", text)


def _parts(fraction: re.Match[str]) -> tuple[bool, int, int]:
    """(negative, numerator, denominator)."""
    top, bottom = (abs(int(part)) for part in fraction.groups() if part is not None)
    return fraction[0].count("-") % 2 == 1, top, bottom


@functools.lru_cache(maxsize=4096)  # the samples of a group often give the same wrong answers
def _ask(gold: str, answer: str) -> bool:
    return _checker().equal(gold, answer)


@functools.cache
def _checker() -> MathChecker:
    checker = MathChecker(workers=max(2, min(16, (os.cpu_count() or 1) // 4)))
    atexit.register(checker.close)
    return checker


class MathChecker:
    """At most `workers` child processes. Each starts when it is first needed and compares one pair at a time.

    A comparison ends after `cpu_limit_s` (whole seconds) of the child's CPU time. `wall_limit_s` covers a
    machine so loaded that the child gets no CPU. Thread-safe.
    """

    def __init__(self, workers: int, cpu_limit_s: int = 5, wall_limit_s: float = 60.0) -> None:
        self.cpu_limit_s = cpu_limit_s
        self.wall_limit_s = wall_limit_s
        self._slots = threading.BoundedSemaphore(workers)
        self._idle: list[_Worker] = []

    def equal(self, gold: str, answer: str) -> bool:
        """math-verify's result. False, with a warning, if it exceeds a limit or ends its process twice.

        RuntimeError if the child cannot start (math-verify is not installed).
        """
        with self._slots:
            for attempt in (1, 2):
                worker = self._take()
                verdict = worker.ask(gold, answer, self.wall_limit_s)
                if verdict is not None:
                    self._idle.append(worker)
                    return verdict
                reason = worker.cause_of_death()
                # Try again if the answer may not have caused the child's end (an out-of-memory kill).
                if attempt == 2 or worker.hit_limit:
                    break
        logger.warning("answer %.80r counts as different from %.80r: the comparison %s", answer, gold, reason)
        return False

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
    """One child process and its pipes."""

    def __init__(self, cpu_limit_s: int) -> None:
        # -P keeps this folder off the child's sys.path. In a new session, the child gets no Ctrl-C of a terminal.
        command = [sys.executable, "-P", str(Path(__file__).with_name("math_worker.py")), str(cpu_limit_s)]
        self._cpu_limit_s = cpu_limit_s
        self._timed_out = False
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
        )
        assert self.process.stdin is not None and self.process.stdout is not None
        self._requests, self._replies = self.process.stdin, self.process.stdout
        if self._read_line(_START_TIMEOUT_S) != b"ready":
            self.reap()
            raise RuntimeError(
                "the process that compares mathematical answers did not start (exit code "
                f"{self.process.returncode}, its error is printed above); is math-verify installed?"
            )

    def ask(self, gold: str, answer: str, wall_limit_s: float) -> bool | None:
        """math-verify's result, or None if the child ended without one."""
        try:
            self._requests.write(json.dumps({"gold": gold, "answer": answer}).encode() + b"\n")
            self._requests.flush()
        except BrokenPipeError:
            reply = b""
        else:
            reply = self._read_line(wall_limit_s)
        if reply:
            return reply == b"1"
        self.reap()
        return None

    @property
    def hit_limit(self) -> bool:
        return self._timed_out or self.process.returncode == -signal.SIGXCPU

    def cause_of_death(self) -> str:
        if self._timed_out:
            return "got too little CPU time on this machine to end"
        if self.hit_limit:
            return f"takes more than {self._cpu_limit_s} s of CPU time"
        return f"ended its process with exit code {self.process.returncode}"

    def reap(self) -> None:
        """End the child by closing its input, so that its exit code shows the cause."""
        with contextlib.suppress(BrokenPipeError):
            self._requests.close()
        try:
            self.process.wait(0 if self._timed_out else 2)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._replies.close()

    def _read_line(self, timeout_s: float) -> bytes:
        """One line without its newline, or b"" if the child has ended or is silent for `timeout_s` seconds."""
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
