"""Runs one command of against_peers.py to its end, with progress lines, its peak memory and a time limit."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from process_tree import PeakMemory, descendants, reap

PATIENCE_S = 60.0
"""Longest wait, in seconds, for processes that outlive the command that started them."""
END_S = 20.0
PROGRESS_S = 15.0
POLL_S = 0.2
_ERROR = re.compile(
    r"^(?:\[?rank\d+\]?:? *)?(?:[\w.]*(?:Error|Exception|Interrupt|Exit)|vime[\w ]*|usage)\b.*:"
)


@dataclass(frozen=True)
class Ended:
    """The result of a command. `begin` and `end` are in seconds since 1970. `peak_gpu_bytes` is None without a GPU."""

    begin: float
    end: float
    peak_bytes: int
    peak_gpu_bytes: int | None


def error_line(log: Path) -> str:
    """Returns the last line with an error, or the last line that is not empty."""
    lines = [
        line.strip()
        for line in log.read_text(errors="replace", encoding="utf-8").splitlines()
        if line.strip()
    ]
    errors = [line for line in lines if _ERROR.match(line)]
    return (errors or lines or ["no output"])[-1][:500]


def execute(
    command: Sequence[str],
    log: Path,
    environment: Mapping[str, str],
    folder: Path,
    *,
    progress: Callable[[float], None],
    limit_s: float,
    gpu: bool,
) -> Ended:
    """Runs a command with its output in `log`. RuntimeError if it fails, or takes longer than `limit_s`.

    `progress` is called at once and then every PROGRESS_S, with the seconds since the command's start.
    """
    failed = True
    try:
        with log.open("w", encoding="utf-8") as output, PeakMemory(gpu=gpu) as memory:
            begin = time.time()
            process = subprocess.Popen(
                command, stdout=output, stderr=subprocess.STDOUT, env=dict(environment), cwd=folder
            )
            said = -PROGRESS_S
            while process.poll() is None and time.time() - begin < limit_s:
                if time.time() - begin - said >= PROGRESS_S:
                    said = time.time() - begin
                    progress(said)
                time.sleep(POLL_S)
            code, end = process.poll(), time.time()
        failed = code != 0
    finally:
        if failed:
            end_all()
    if code is None:
        raise RuntimeError(f"a run must end within {limit_s:g} s, got none: {error_line(log)}; read {log}")
    if code:
        raise RuntimeError(f"a run must exit with 0, got {code}: {error_line(log)}; read {log}")
    reap(PATIENCE_S)
    return Ended(begin, end, memory.peak_bytes, memory.peak_gpu_bytes)


def end_all() -> None:
    """Ends every descendant of this process: regularly within END_S, or else by SIGKILL."""
    for number, patience_s in ((signal.SIGTERM, END_S), (signal.SIGKILL, END_S)):
        for process in descendants(os.getpid()):
            try:
                os.kill(process, number)
            except ProcessLookupError:
                continue
        try:
            return reap(patience_s)
        except TimeoutError:
            continue
