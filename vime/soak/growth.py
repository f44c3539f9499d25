"""Memory, open files and threads of the parts of a run, read from the operating system, and their growth.

A part is one process with all its children. Its memory is its allocated memory, the kernel's `Pss_Anon` and
`Pss_Shmem`. Pages that several processes share count once in total. Pages of files, such as libraries, do not count,
because their share depends on other running processes.

The growth of a part is a straight line through the smallest value of every ten steps. Each process that the part had
has its own level, and all processes have one slope. The smallest value leaves out memory that a step allocates and
frees.
"""

from __future__ import annotations

import contextlib
import math
import re
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from vime.soak.parts import PARTS, Descendants, command_line, with_children

MEASURED = ("driver", "manager", "trainer", "engine", "router")
WARM_UP_STEPS = 50
"""Number of first steps of a process that do not count, because caches, memory pools and the KV cache fill."""
WARM_UP_REQUESTS = {"router": 4000}
"""Number of first requests of a process of these parts that do not count: the heaps of the router's threads grow until
they have their largest size (benchmarks/reports/router_memory_cpu.md)."""
BLOCK_STEPS, FEWEST_READINGS = 10, 3
FEWEST_BLOCKS = 10
"""Smallest number of blocks of a part, over all its processes, from which a growth is computed."""
ALLOWED_PERCENT = 1.0
"""Allowed growth of memory per 100 steps, in percent."""
ALLOWED_COUNT = 2.0
"""Allowed growth of the numbers of open files and of threads per 100 steps."""


@dataclass(frozen=True)
class Reading:
    """One part after one step. `process` identifies the process of the part, which changes after a restart."""

    step: int
    part: str
    process: int
    memory_kib: int
    files: int
    threads: int


@dataclass(frozen=True)
class Slope:
    """Growth per 100 steps, with two standard errors."""

    value: float
    uncertainty: float

    def exceeds(self, allowed: float) -> bool:
        """Returns whether the slope minus its uncertainty is above `allowed`."""
        return self.value - self.uncertainty > allowed


@dataclass(frozen=True)
class Growth:
    """Growth of a part. `memory` is in percent of `memory_mib`, the mean. `blocks` is the number of blocks of ten
    steps. With too few blocks, the slopes are None."""

    part: str
    processes: int
    blocks: int
    memory_mib: float
    memory: Slope | None
    files: Slope | None
    threads: Slope | None

    @property
    def text(self) -> str:
        """Returns the growth in words."""

        def describe(slope: Slope | None, unit: str) -> str:
            if slope is None:
                return "not judged"
            return f"{slope.value:+.2f}{unit} (2 s.e. {slope.uncertainty:.2f})"

        files, threads = describe(self.files, ""), describe(self.threads, "")
        return f"memory {describe(self.memory, '%')}, files {files}, threads {threads} per 100 steps"

    @property
    def is_too_fast(self) -> bool:
        return any(
            slope is not None and slope.exceeds(allowed)
            for slope, allowed in (
                (self.memory, ALLOWED_PERCENT),
                (self.files, ALLOWED_COUNT),
                (self.threads, ALLOWED_COUNT),
            )
        )


def count_warm_up(part: str, samples: int) -> int:
    """Returns the number of first steps of a process that do not count. A step has `samples` requests."""
    return max(WARM_UP_STEPS, math.ceil(WARM_UP_REQUESTS.get(part, 0) / samples))


def find_growth(found: Iterable[Reading], part: str, samples: int) -> Growth:
    """Computes the growth of `part` over all its processes, without each process's first steps. A step has `samples`
    samples."""
    warm_up = count_warm_up(part, samples)
    readings = [one for one in found if one.part == part]
    lives: dict[int, list[Reading]] = defaultdict(list)
    for one in readings:
        lives[one.process].append(one)
    blocks: dict[tuple[int, int], list[Reading]] = defaultdict(list)
    for process, life in lives.items():
        first = min(one.step for one in life)
        for one in life:
            if one.step - first >= warm_up:
                blocks[process, one.step // BLOCK_STEPS].append(one)
    # The smallest reading, if there are only one or two, may be from the middle of a step.
    blocks = {where: block for where, block in blocks.items() if len(block) >= FEWEST_READINGS}
    mean = statistics.mean(one.memory_kib for one in readings) / 1024 if readings else 0.0
    slopes: dict[str, Slope] = {}
    if len(blocks) >= FEWEST_BLOCKS:
        for name, unit in (("memory_kib", mean * 1024 / 100), ("files", 1.0), ("threads", 1.0)):
            lowest = [
                (process, number * BLOCK_STEPS, min(getattr(one, name) for one in block) / unit)
                for (process, number), block in blocks.items()
            ]
            slopes[name] = fit_slope(lowest)
    return Growth(
        part,
        len(lives),
        len(blocks),
        mean,
        slopes.get("memory_kib"),
        slopes.get("files"),
        slopes.get("threads"),
    )


def fit_slope(points: Sequence[tuple[int, int, float]]) -> Slope:
    """Fits (process, step, value) by least squares, with one level per process and one common slope."""
    by_process: dict[int, list[tuple[int, float]]] = defaultdict(list)
    for process, step, value in points:
        by_process[process].append((step, value))
    pairs = []
    for process_points in by_process.values():
        middle, level = (statistics.mean(column) for column in zip(*process_points, strict=True))
        pairs += [(step - middle, value - level) for step, value in process_points]
    spread = sum(x * x for x, _ in pairs)
    if not spread:
        return Slope(0.0, math.inf)
    slope = sum(x * y for x, y in pairs) / spread
    left = sum((y - slope * x) ** 2 for x, y in pairs)
    freedom = len(points) - len(by_process) - 1
    error = math.sqrt(left / freedom / spread) if freedom > 0 else math.inf
    return Slope(100 * slope, 200 * error)


def read_parts(started: Descendants, step: int, parts: Iterable[str] = MEASURED) -> list[Reading]:
    """Reads all parts now. A part that is starting or has ended has no reading."""
    table = [(process, command_line(process)) for process in started.members()]
    found = []
    for part in parts:
        first = next((process for process, command in table if re.search(PARTS[part], command)), None)
        if first is None:
            continue
        with contextlib.suppress(psutil.Error, OSError):
            # The driver's descendants are the other parts.
            processes = [first] if part == "driver" else with_children(first)
            found.append(
                Reading(
                    step=step,
                    part=part,
                    process=first.pid,
                    memory_kib=sum(allocated_kib(process.pid) for process in processes),
                    files=sum(process.num_fds() for process in processes),
                    threads=sum(process.num_threads() for process in processes),
                )
            )
    return found


def allocated_kib(pid: int) -> int:
    text = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii", errors="replace")
    return sum(int(size) for size in re.findall(r"^Pss_(?:Anon|Shmem): +(\d+) kB", text, re.MULTILINE))
