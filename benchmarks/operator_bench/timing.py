"""Checks each contender with a separate call, and then times all contenders in one hot state. Also reads the memory and
the kernels of a call.

A cold GPU is faster than a GPU at its power limit, and this difference is larger than the measured differences.
Therefore the reference operation (a matrix product or a copy) runs right before each timed call, all contenders take
turns in every round in an order that changes, and results are ratios of medians in the same run.
"""

from __future__ import annotations

import math
import random
import re
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from rl_kernel import telemetry
from rl_kernel.host import Facts

Step = Callable[[], object]
Mark = TypeVar("Mark")
"""A clock's mark of a point in time."""

FILL_MS = 3.0
"""`fill_ms` of a GPU. It hides the host's launches, as the model's forward does in training. A one-pass call takes 1.5
ms on the host, and the smallest case takes 1.3 ms on the GPU."""
BUDGET_MS = 1500.0
"""Largest timed milliseconds of a row; slower rows take part in fewer rounds."""
LEAST_CALLS = 6
"""Smallest number of calls for a 95% interval of the ratio of two contenders (the sign test: 2 / 2^6)."""
MIB = 2**20


class Clock(Protocol[Mark]):
    """Makes marks that are read after `finish`. `fill_ms` is the reference work that is queued before a timed call."""

    fill_ms: float

    def mark(self) -> Mark: ...

    def finish(self) -> None: ...

    def elapsed_ms(self, start: Mark, end: Mark) -> float: ...


class CudaClock:
    """CUDA events on the current stream."""

    fill_ms = FILL_MS

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def finish(self) -> None:
        torch.cuda.synchronize()

    def elapsed_ms(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        return float(start.elapsed_time(end))


class HostClock:
    """Wall time for a CPU, on which no launches run ahead."""

    fill_ms = 0.0

    def mark(self) -> float:
        return time.perf_counter()

    def finish(self) -> None:
        pass

    def elapsed_ms(self, start: float, end: float) -> float:
        return (end - start) * 1e3


def clock_of(device: torch.device) -> Clock[Any]:
    return CudaClock() if device.type == "cuda" else HostClock()


@dataclass(frozen=True)
class CallTimes:
    """Milliseconds of a contender's calls."""

    ms: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.ms)

    def as_json(self) -> dict[str, float | int]:
        values = {"median": self.median, "min": min(self.ms), "max": max(self.ms)}
        return {**{name: round(value, 5) for name, value in values.items()}, "calls": len(self.ms)}

    def each_as_json(self) -> Facts:
        """Returns `as_json` and every call in the order of the rounds, with five digits. The k-th calls of two
        contenders belong to the same round, so their ratio has a spread."""
        return self.as_json() | {"each": [float(f"{ms:.5g}") for ms in self.ms]}


@dataclass
class Timings:
    """Times of the contenders. `yardstick` has one sample per timed call. `failed` has failed contenders with
    reasons."""

    yardstick: CallTimes
    contenders: dict[str, CallTimes]
    failed: dict[str, str]


@dataclass(frozen=True)
class Plan:
    """Settings of the measurement."""

    rounds: int
    heat_s: float


@dataclass(frozen=True)
class Entry:
    """One row. `row` has its facts, to which `measure` adds its results.

    build: returns the call to time; it raises ImportError if the library is missing.
    errors: computes the row's errors from the outputs of a call.
    kept: returns the tensors that a call with these outputs must keep; their memory is not extra.
    """

    row: Facts
    build: Callable[[], Step]
    errors: Callable[[Any], Facts]
    kept: Callable[[Any], Iterable[Tensor | None]]


def reason_of(error: BaseException) -> str:
    """Returns one line with the reason why a contender has no number. File names have no folders."""
    if isinstance(error, torch.cuda.OutOfMemoryError):
        return "out of memory"
    first = (str(error).strip().splitlines() or [""])[0]
    text = re.sub(r"(?:/[\w.+-]+)+/(?=[\w.+-])", "", first)[:120]
    if isinstance(error, ImportError):
        return f"not importable ({text})"
    return f"{type(error).__name__}: {text}"


def calls_within(budget_ms: float, one_call_ms: float, rounds: int) -> int:
    """Returns a contender's number of rounds: fewer for slow contenders, but at least LEAST_CALLS."""
    if one_call_ms * rounds <= budget_ms:
        return rounds
    return min(rounds, max(LEAST_CALLS, int(budget_ms / one_call_ms)))


def measure(
    entries: Sequence[Entry], yardstick: Step, device: torch.device, plan: Plan, clear: Step
) -> Timings:
    """Returns the times by name of the row. Each row gets its errors and memory, or the reason why it has no time.

    `clear` drops all gradients.
    """
    clock = clock_of(device)
    steps: dict[str, Step] = {}
    calls: dict[str, int] = {}
    for entry in entries:
        name = entry.row["name"]
        try:
            step = entry.build()
            one_call_ms = _first_calls(entry, step, device, clock, clear)
            calls[name] = calls_within(BUDGET_MS, one_call_ms, plan.rounds)
            steps[name] = step
        except Exception as error:  # border: a row that cannot run says why
            entry.row["skipped"] = reason_of(error)
            if device.type == "cuda":
                torch.cuda.empty_cache()
        clear()
    heat(yardstick, clock, plan.heat_s)
    timings = take_turns(yardstick, steps, rounds=plan.rounds, clock=clock, reset=clear, calls=calls)
    for entry in entries:
        if entry.row["name"] in timings.failed:
            entry.row["skipped"] = timings.failed[entry.row["name"]]
    return timings


def _first_calls(entry: Entry, step: Step, device: torch.device, clock: Clock[Mark], clear: Step) -> float:
    """Makes a checked call, which also compiles, and a call whose memory and time are read. Returns its
    milliseconds."""
    held = _allocated(device)
    what_ran()
    outputs = step()
    clock.finish()
    entry.row.update(what_ran() | entry.errors(outputs))
    del outputs
    clear()
    if (retained := (_allocated(device) - held) / MIB) >= 1:
        entry.row["retained_mib"] = round(retained, 1)
    one_call_ms, extra_mib = probe(step, clock, entry.kept)
    if extra_mib is not None:
        entry.row["extra_mib"] = round(extra_mib, 1)
    return one_call_ms


def what_ran() -> Facts:
    """Returns each operator's implementation in the calls since the last look, and the reasons why no kernel ran."""
    done = telemetry(reset=True)
    found: Facts = {
        "implementation": {name: ", ".join(facts["implementations"]) for name, facts in done.items()}
    }
    if fallbacks := sorted({reason for facts in done.values() for reason in facts["fallbacks"]}):
        found["fallbacks"] = fallbacks
    return found


def _allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def take_turns(
    yardstick: Step,
    contenders: Mapping[str, Step],
    *,
    rounds: int,
    clock: Clock[Mark],
    reset: Step,
    calls: Mapping[str, int],
) -> Timings:
    """Times every contender once per round, right after the reference operation. The host waits once per round.

    `reset` runs before each call, outside the timed span (it drops old gradients). `calls` limits the rounds of a
    contender. A contender that raises an error is removed, with the reason.
    """
    spans: dict[str, list[tuple[Mark, Mark]]] = {name: [] for name in contenders}
    yardsticks: list[tuple[Mark, Mark]] = []
    failed: dict[str, str] = {}
    fill = _repeats(yardstick, clock)
    for turn in range(rounds):
        names = [name for name in contenders if turn < calls[name] and name not in failed]
        random.Random(turn).shuffle(names)
        for name in names:
            reset()
            for _ in range(fill - 1):
                yardstick()
            before = clock.mark()
            yardstick()
            start = clock.mark()
            try:
                contenders[name]()
            except Exception as error:  # border: a contender's failure is its row, not the end of the run
                failed[name] = reason_of(error)
                continue
            spans[name].append((start, clock.mark()))
            yardsticks.append((before, start))
        reset()
        clock.finish()

    def samples(marks: Iterable[tuple[Mark, Mark]]) -> CallTimes:
        return CallTimes(tuple(clock.elapsed_ms(start, end) for start, end in marks))

    measured = {name: samples(marks) for name, marks in spans.items() if marks and name not in failed}
    return Timings(samples(yardsticks or [_once(yardstick, clock)]), measured, failed)


def _once(step: Step, clock: Clock[Mark]) -> tuple[Mark, Mark]:
    start = clock.mark()
    step()
    end = clock.mark()
    clock.finish()
    return start, end


def _repeats(yardstick: Step, clock: Clock[Mark]) -> int:
    """Returns the number of reference calls that take the clock's `fill_ms`, at least 1 (the timed call)."""
    yardstick()
    one_ms = clock.elapsed_ms(*_once(yardstick, clock))
    return max(1, math.ceil(clock.fill_ms / max(one_ms, 1e-3)))


def heat(yardstick: Step, clock: Clock[Mark], seconds: float) -> None:
    """Runs the reference operation for `seconds`, until the GPU's clock is stable."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for _ in range(4):
            yardstick()
        clock.finish()


def probe(
    step: Step, clock: Clock[Mark], kept: Callable[[Any], Iterable[Tensor | None]]
) -> tuple[float, float | None]:
    """Returns (ms, extra MiB) of a call; the second value is None on a CPU.

    Extra memory is the peak of allocated memory during the call, minus the memory before the call, and minus new
    tensors that the call must keep (`kept` of its outputs).
    """
    if isinstance(clock, HostClock):
        return clock.elapsed_ms(*_once(step, clock)), None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    start = clock.mark()
    outputs = step()
    end = clock.mark()
    clock.finish()
    peak = torch.cuda.max_memory_allocated() - before
    mandatory = sum(left.untyped_storage().nbytes() for left in kept(outputs) if left is not None)
    return clock.elapsed_ms(start, end), (peak - mandatory) / MIB


def trace(call: Step, device: torch.device, reset: Step) -> tuple[float, list[tuple[str, float, int]]]:
    """Returns (ms of a call, [(kernel, ms, launches)]); on a CPU, operators replace kernels. `reset` runs between
    calls."""
    clock = clock_of(device)
    for _ in range(3):
        call()
        reset()
    clock.finish()
    wall_ms = clock.elapsed_ms(*_once(call, clock))
    reset()
    on_gpu = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(activities=activities) as profiler:
        call()
        clock.finish()
    kind = DeviceType.CUDA if on_gpu else DeviceType.CPU
    found = []
    for event in profiler.key_averages():
        us = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        # Annotations on the device's time line cover kernels that are already counted.
        if event.device_type == kind and us > 0 and not getattr(event, "is_user_annotation", False):
            found.append((event.key, us / 1e3, event.count))
    return wall_ms, found
