"""Counts calls, tokens, fallbacks by reason, milliseconds if timing is on, and the time of compilations.

Counting adds a few integers per call. Timing records two CUDA events per call (on the host: wall time). Only
`telemetry()` reads the events, so that timing never stops a stream.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypedDict

if TYPE_CHECKING:
    import torch
    from triton.knobs import CompileTimes

    from rl_kernel.dispatch import Choice


class OperatorCalls(TypedDict):
    """Counts of an operator. implementations, variants: name -> calls. fallbacks: reason -> calls. ms:
    milliseconds."""

    calls: int
    tokens: int
    implementations: dict[str, int]
    variants: dict[str, int]
    fallbacks: dict[str, int]
    ms: float


@dataclass
class _Counts:
    calls: int = 0
    tokens: int = 0
    implementations: Counter[str] = field(default_factory=Counter)
    variants: Counter[str] = field(default_factory=Counter)
    fallbacks: Counter[str] = field(default_factory=Counter)
    ms: float = 0.0
    pending: list[tuple[torch.cuda.Event, torch.cuda.Event]] = field(default_factory=list)


_counts: defaultdict[str, _Counts] = defaultdict(_Counts)
_timing = False
_compiled_ms: float | None = None
"""Milliseconds of compilation since the last `compiled_ms`; None before `time_compilations`."""


def record(choice: Choice, tokens: int) -> None:
    """Counts one call."""
    counts = _counts[choice.operator]
    counts.calls += 1
    counts.tokens += tokens
    counts.implementations[choice.implementation] += 1
    if choice.fallback:
        counts.fallbacks[choice.reason] += 1


def record_variant(operator: str, variant: str) -> None:
    """Counts the fast variant that ran a call, and the reason why a faster variant did not run."""
    _counts[operator].variants[variant] += 1


def set_timing(on: bool) -> None:
    """Turns the milliseconds of `telemetry()` on or off."""
    global _timing
    _timing = on


def time_compilations() -> None:
    """Starts counting the compilations of Triton in this process for `compiled_ms`. Needs Triton. A listener that was
    already set in Triton continues to receive each compilation."""
    global _compiled_ms
    if _compiled_ms is not None:
        return
    from triton import knobs

    other, _compiled_ms = knobs.compilation.listener, 0.0

    def listener(*, times: CompileTimes, cache_hit: bool, **rest: object) -> None:
        global _compiled_ms
        if not cache_hit:  # a cache hit reads the code from Triton's cache on disk
            _compiled_ms = (_compiled_ms or 0.0) + times.total / 1e3
        if other is not None:
            other(times=times, cache_hit=cache_hit, **rest)

    knobs.compilation.listener = listener


def compiled_ms() -> float:
    """Returns the milliseconds that Triton spent on compilations in this process since the last call. The sum includes
    other packages' kernels. It is 0.0 before `time_compilations`."""
    global _compiled_ms
    if _compiled_ms is None:
        return 0.0
    found, _compiled_ms = _compiled_ms, 0.0
    return found


@contextmanager
def timed(operator: str, device: torch.device) -> Iterator[None]:
    """Adds the time of the `with` block to the operator's milliseconds, if timing is on."""
    if not _timing:
        yield
    elif device.type == "cuda":
        import torch

        events = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        events[0].record()
        yield
        events[1].record()
        _counts[operator].pending.append(events)
    else:
        start = time.perf_counter()
        yield
        _counts[operator].ms += (time.perf_counter() - start) * 1e3


def telemetry(*, reset: bool = False) -> dict[str, OperatorCalls]:
    """Returns per operator since the last reset: calls, tokens, implementations, variants, fallbacks {reason: calls},
    ms.

    `ms` includes the calls, and the backward of fast implementations; the backward of a reference is not timed. Waits
    for the device if there are timings to read.
    """
    result: dict[str, OperatorCalls] = {}
    for name, counts in _counts.items():
        for start, end in counts.pending:
            end.synchronize()
            counts.ms += start.elapsed_time(end)
        counts.pending.clear()
        result[name] = {
            "calls": counts.calls,
            "tokens": counts.tokens,
            "implementations": dict(counts.implementations),
            "variants": dict(counts.variants),
            "fallbacks": dict(counts.fallbacks),
            "ms": counts.ms,
        }
    if reset:
        _counts.clear()
    return result
