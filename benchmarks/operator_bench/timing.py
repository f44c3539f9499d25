"""Measuring many contenders: each is checked with a call of its own, then all are timed in one hot state. Of one call
its memory and its kernels.

A GPU runs faster cold than under its power limit, and the two differ by more than what is to be measured. So the
yardstick (a matrix product, a copy) runs right before each timed call, all contenders take turns in every round, in
an order that changes, and results are ratios of medians of one run.
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
"""What a clock gives for a moment."""

FILL_MS = 3.0
"""`fill_ms` of a GPU: hides the host's launches, as the model's forward does in training. A whole one-pass call takes
the host 1.5 ms, the smallest case takes the GPU 1.3 ms."""
BUDGET_MS = 1500.0
"""Timed milliseconds a row may use; slower ones take part in fewer rounds."""
LEAST_CALLS = 6
"""As few as an interval at 95% of the ratio of two contenders takes (the sign test: 2 / 2^6)."""
MIB = 2**20


class Clock(Protocol[Mark]):
    """Marks on a time line, read after `finish`. `fill_ms`: yardstick work queued before each timed call."""

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
    """Wall time, for the CPU, whose launches run ahead of nothing."""

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
    """Milliseconds of the calls of one contender."""

    ms: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.ms)

    def as_json(self) -> dict[str, float | int]:
        values = {"median": self.median, "min": min(self.ms), "max": max(self.ms)}
        return {**{name: round(value, 5) for name, value in values.items()}, "calls": len(self.ms)}

    def each_as_json(self) -> Facts:
        """`as_json` and every call in the order of the rounds, to five digits: call k of two contenders is of one
        round, so the ratio of the two has a spread. For contenders, whose calls the rounds bound."""
        return self.as_json() | {"each": [float(f"{ms:.5g}") for ms in self.ms]}


@dataclass
class Timings:
    """`yardstick` has one sample for each timed call; `failed` names the contenders that broke, with why."""

    yardstick: CallTimes
    contenders: dict[str, CallTimes]
    failed: dict[str, str]


@dataclass(frozen=True)
class Plan:
    """How thoroughly to measure."""

    rounds: int
    heat_s: float


@dataclass(frozen=True)
class Entry:
    """One row: `row` are its facts, to which `measure` adds what it finds.

    build: gives the call to time; an ImportError there says that the library is missing.
    errors: what the row says of the outputs of a call.
    kept: the tensors that a call with these outputs has to leave behind; their memory is not extra.
    """

    row: Facts
    build: Callable[[], Step]
    errors: Callable[[Any], Facts]
    kept: Callable[[Any], Iterable[Tensor | None]]


def reason_of(error: BaseException) -> str:
    """One line for a table: why a contender has no number. Files are named without the folders of the machine."""
    if isinstance(error, torch.cuda.OutOfMemoryError):
        return "out of memory"
    first = (str(error).strip().splitlines() or [""])[0]
    text = re.sub(r"(?:/[\w.+-]+)+/(?=[\w.+-])", "", first)[:120]
    if isinstance(error, ImportError):
        return f"not importable ({text})"
    return f"{type(error).__name__}: {text}"


def calls_within(budget_ms: float, one_call_ms: float, rounds: int) -> int:
    """How many of the rounds a contender takes part in: slow ones in fewer, all in at least LEAST_CALLS."""
    if one_call_ms * rounds <= budget_ms:
        return rounds
    return min(rounds, max(LEAST_CALLS, int(budget_ms / one_call_ms)))


def measure(
    entries: Sequence[Entry], yardstick: Step, device: torch.device, plan: Plan, clear: Step
) -> Timings:
    """The times by name of the row. Each row gets its errors and memory, or the reason why it has no time.

    `clear` drops the gradients of all entries.
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
    """A checked call (which also compiles), then one whose memory and time are read; returns its milliseconds."""
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
    """Of the calls since the last look: which implementation each operator ran, and why no kernel where none did."""
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
    """Time every contender once a round, each right after the yardstick; the host waits once a round.

    `reset` runs before each call, outside the timed span (it drops old gradients). `calls` bounds the rounds of a
    contender. A contender that raises is out, with the reason.
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
    """Yardstick calls that take the clock's `fill_ms`; at least 1, the timed one."""
    yardstick()
    one_ms = clock.elapsed_ms(*_once(yardstick, clock))
    return max(1, math.ceil(clock.fill_ms / max(one_ms, 1e-3)))


def heat(yardstick: Step, clock: Clock[Mark], seconds: float) -> None:
    """Run the yardstick until the chip has settled at the clock it can hold."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for _ in range(4):
            yardstick()
        clock.finish()


def probe(
    step: Step, clock: Clock[Mark], kept: Callable[[Any], Iterable[Tensor | None]]
) -> tuple[float, float | None]:
    """(ms, extra MiB) of one call; the second is None on a CPU.

    Extra: the largest amount of memory allocated during the call, beyond what was allocated before it and beyond
    the tensors that it has to leave behind (`kept` of its outputs) and that did not exist before.
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
    """(ms of one call, [(kernel, ms, launches)]); on a CPU, operators for kernels. `reset` runs between calls."""
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
        # Annotations on the device's time line cover kernels that are counted already.
        if event.device_type == kind and us > 0 and not getattr(event, "is_user_annotation", False):
            found.append((event.key, us / 1e3, event.count))
    return wall_ms, found
