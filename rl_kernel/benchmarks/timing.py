"""Timing of many contenders in one hot state; of one call its memory and its kernels.

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
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

Step = Callable[[], Any]

FILL_MS = 3.0
"""Yardstick work queued before each timed call: hides the host's launches, as the model's forward does in training. A
whole one-pass call takes the host 1.5 ms, the smallest case takes the GPU 1.3 ms."""
LEAST_CALLS = 6
"""As few as an interval at 95% of the ratio of two contenders takes (the sign test: 2 / 2^6)."""
MIB = 2**20


class Clock(Protocol):
    """Marks on a time line, read after `finish`."""

    def mark(self) -> Any: ...

    def finish(self) -> None: ...

    def elapsed_ms(self, start: Any, end: Any) -> float: ...


class CudaClock:
    """CUDA events on the current stream."""

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def finish(self) -> None:
        torch.cuda.synchronize()

    def elapsed_ms(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        return float(start.elapsed_time(end))


class HostClock:
    """Wall time, for the CPU."""

    def mark(self) -> float:
        return time.perf_counter()

    def finish(self) -> None:
        pass

    def elapsed_ms(self, start: float, end: float) -> float:
        return (end - start) * 1e3


def clock_of(device: torch.device) -> Clock:
    return CudaClock() if device.type == "cuda" else HostClock()


@dataclass(frozen=True)
class Samples:
    """Milliseconds of the calls of one contender."""

    ms: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.ms)

    def over(self, yardstick_ms: float) -> tuple[float, float, float]:
        """Median, least and largest as multiples of `yardstick_ms`."""
        return self.median / yardstick_ms, min(self.ms) / yardstick_ms, max(self.ms) / yardstick_ms

    def as_json(self) -> dict[str, float | int]:
        values = {"median": self.median, "min": min(self.ms), "max": max(self.ms)}
        return {**{name: round(value, 5) for name, value in values.items()}, "calls": len(self.ms)}

    def each_as_json(self) -> dict[str, Any]:
        """`as_json` and every call in the order of the rounds, to five digits: call k of two contenders is of one
        round, so the ratio of the two has a spread. For contenders, whose calls the rounds bound."""
        return self.as_json() | {"each": [float(f"{ms:.5g}") for ms in self.ms]}


@dataclass
class Timings:
    """`yardstick` has one sample for each timed call; `failed` names the contenders that broke, with why."""

    yardstick: Samples
    contenders: dict[str, Samples] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)


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


def take_turns(
    yardstick: Step,
    contenders: Mapping[str, Step],
    *,
    rounds: int,
    clock: Clock,
    reset: Step = lambda: None,
    calls: Mapping[str, int] | None = None,
    fill_ms: float | None = None,
) -> Timings:
    """Time every contender once a round, each right after the yardstick; the host waits once a round.

    `reset` runs before each call, outside the timed span (it drops old gradients). `calls` bounds the rounds of a
    contender. A contender that raises is out, with the reason. `fill_ms`: yardstick work before a call, the timed
    one included; by default FILL_MS where launches run ahead of the device.
    """
    spans: dict[str, list[tuple[Any, Any]]] = {name: [] for name in contenders}
    yardsticks: list[tuple[Any, Any]] = []
    failed: dict[str, str] = {}
    ahead = FILL_MS if isinstance(clock, CudaClock) else 0.0
    fill = _repeats(yardstick, clock, ahead if fill_ms is None else fill_ms)
    for turn in range(rounds):
        names = [name for name in contenders if turn < (calls or {}).get(name, rounds) and name not in failed]
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

    def samples(marks: Iterable[tuple[Any, Any]]) -> Samples:
        return Samples(tuple(clock.elapsed_ms(start, end) for start, end in marks))

    measured = {name: samples(marks) for name, marks in spans.items() if marks and name not in failed}
    return Timings(samples(yardsticks or [_once(yardstick, clock)]), measured, failed)


def _once(step: Step, clock: Clock) -> tuple[Any, Any]:
    start = clock.mark()
    step()
    end = clock.mark()
    clock.finish()
    return start, end


def _repeats(yardstick: Step, clock: Clock, fill_ms: float) -> int:
    """Yardstick calls that take `fill_ms`; at least 1, the timed one."""
    yardstick()
    one_ms = clock.elapsed_ms(*_once(yardstick, clock))
    return max(1, math.ceil(fill_ms / max(one_ms, 1e-3))) if fill_ms > 0 else 1


def heat(yardstick: Step, clock: Clock, seconds: float) -> None:
    """Run the yardstick until the chip has settled at the clock it can hold."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for _ in range(4):
            yardstick()
        clock.finish()


def probe(
    step: Step, clock: Clock, kept: Callable[[Any], Iterable[Tensor | None]]
) -> tuple[float, float | None]:
    """(ms, extra MiB) of one call; the second is None on a CPU.

    Extra: the largest amount of memory allocated during the call, beyond what was allocated before it and beyond
    the tensors that it has to leave behind (`kept` of its outputs) and that did not exist before.
    """
    if isinstance(clock, HostClock):
        start = clock.mark()
        step()
        return clock.elapsed_ms(start, clock.mark()), None
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


def trace(call: Callable[[], Any], device: torch.device) -> tuple[float, list[tuple[str, float, int]]]:
    """(ms of one call, [(kernel, ms, launches)]); on a CPU, operators instead of kernels."""
    clock = clock_of(device)
    for _ in range(3):
        call()
    clock.finish()
    start = clock.mark()
    call()
    end = clock.mark()
    clock.finish()
    wall_ms = clock.elapsed_ms(start, end)
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
