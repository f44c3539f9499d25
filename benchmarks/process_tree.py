"""Measures the memory of this process's descendants, with shared pages counted once, and the used GPU memory."""

from __future__ import annotations

import ctypes
import os
import subprocess
import threading
import time
from types import TracebackType

import psutil

from slime.memory.processes import proportional

INTERVAL_S = 1.0
GPU_HOST_INTERVAL_S = 5.0
"""Seconds between two samples on a GPU host, where processes map much memory and a sample takes time."""
GPU_INTERVAL_MS = 200
PR_SET_CHILD_SUBREAPER = 36
"""prctl(2)'s number."""


def adopt_orphans() -> None:
    """Makes this process the parent of every descendant whose parent has ended, so that the sum misses no process."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")


def descendants(root: int) -> list[int]:
    """Returns the process ids of the descendants of `root`."""
    return [process.pid for process in psutil.Process(root).children(recursive=True)]


def pss_bytes(process: int) -> int:
    """Returns the proportional set size: a page that n processes share counts 1/n. 0 for a process that has ended."""
    return proportional(process) or 0


def visible_gpu() -> str:
    """Returns the first GPU that a command sees, as an index or a UUID for nvidia-smi."""
    return os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0] or "0"


def reap(patience_s: float) -> None:
    """Waits until this process has no child, including adopted processes. TimeoutError if some are left."""
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
    """Samples the sum over the descendants of this process, in a thread; `peak_bytes` is the largest.

    With `gpu`, it also samples the used memory of the first visible GPU with nvidia-smi. `peak_gpu_bytes` is the
    largest value, and None without `gpu`.
    """

    def __init__(self, *, gpu: bool = False) -> None:
        self.peak_bytes = 0
        self.peak_gpu_bytes: int | None = None
        self._stop = threading.Event()
        self._interval_s = GPU_HOST_INTERVAL_S if gpu else INTERVAL_S
        self._threads = [threading.Thread(target=self._sample, daemon=True)]
        self._listing: subprocess.Popen[str] | None = None
        if gpu:
            self._threads.append(threading.Thread(target=self._sample_gpu, daemon=True))

    def __enter__(self) -> PeakMemory:
        if len(self._threads) > 1:
            query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
            self._listing = subprocess.Popen(
                [*query, "-i", visible_gpu(), "-lms", str(GPU_INTERVAL_MS)], stdout=subprocess.PIPE, text=True
            )
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        if self._listing:
            self._listing.terminate()
        for thread in self._threads:
            thread.join()
        if self._listing:
            self._listing.wait()

    def _sample(self) -> None:
        while not self._stop.wait(self._interval_s):
            self.peak_bytes = max(self.peak_bytes, sum(map(pss_bytes, descendants(os.getpid()))))

    def _sample_gpu(self) -> None:
        assert self._listing and self._listing.stdout
        for line in self._listing.stdout:
            if line.strip().isdigit():  # The last line is incomplete.
                self.peak_gpu_bytes = max(self.peak_gpu_bytes or 0, int(line) << 20)
