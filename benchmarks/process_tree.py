"""Memory of all processes below this one: of a command with everything that it started, shared pages counted once."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from pathlib import Path
from types import TracebackType

INTERVAL_S = 1.0
PR_SET_CHILD_SUBREAPER = 36
"""prctl(2)'s number."""


def adopt_orphans() -> None:
    """A process whose parent has ended becomes a child of this process, so that no part of a command is missed."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")


def descendants(root: int) -> list[int]:
    """The processes below `root`, without it."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                # The name of the command, in parentheses, may hold spaces and parentheses itself.
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except (FileNotFoundError, ProcessLookupError):
                continue  # ended since the folder was listed
            children.setdefault(int(fields[1]), []).append(int(entry.name))
    found = list(children.get(root, ()))
    for process in found:  # grows while it is read
        found.extend(children.get(process, ()))
    return found


def pss_bytes(process: int) -> int:
    """The proportional set size: a page that n processes share counts 1/n. 0 for a process that has ended."""
    try:
        lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


def reap(patience_s: float) -> None:
    """Wait until this process has no child, adopted ones included. TimeoutError if some are left."""
    end = time.monotonic() + patience_s
    while True:
        try:
            ended, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not ended:
            if time.monotonic() > end:
                left = descendants(os.getpid())
                raise TimeoutError(
                    f"a command must end with all its processes, got {left} after {patience_s:g} s"
                )
            time.sleep(0.1)


class PeakMemory:
    """Samples the sum over the descendants of this process once a second, in a thread; `peak_bytes` is the largest."""

    def __init__(self) -> None:
        self.peak_bytes = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> PeakMemory:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._stop.wait(INTERVAL_S):
            self.peak_bytes = max(self.peak_bytes, sum(map(pss_bytes, descendants(os.getpid()))))
