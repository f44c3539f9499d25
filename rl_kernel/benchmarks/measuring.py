"""The one measuring loop: check every row with a call of its own, then time all of them in turns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rl_kernel import telemetry
from rl_kernel.benchmarks import timing
from rl_kernel.benchmarks.timing import MIB, Clock, Step, Timings, reason_of

BUDGET_MS = 1500.0
"""Timed milliseconds a row may use; slower ones take part in fewer rounds."""


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

    row: dict[str, Any]
    build: Callable[[], Step]
    errors: Callable[[Any], dict[str, Any]]
    kept: Callable[[Any], Iterable[Tensor | None]]


def measure(
    entries: Sequence[Entry], yardstick: Step, device: torch.device, plan: Plan, clear: Step
) -> Timings:
    """The times by name of the row. Each row gets its errors and memory, or the reason why it has no time.

    `clear` drops the gradients of all entries.
    """
    clock = timing.clock_of(device)
    steps: dict[str, Step] = {}
    calls: dict[str, int] = {}
    for entry in entries:
        name = entry.row["name"]
        try:
            step = entry.build()
            one_call_ms = _first_calls(entry, step, device, clock, clear)
            calls[name] = timing.calls_within(BUDGET_MS, one_call_ms, plan.rounds)
            steps[name] = step
        except Exception as error:  # border: a row that cannot run says why
            entry.row["skipped"] = reason_of(error)
            if device.type == "cuda":
                torch.cuda.empty_cache()
        clear()
    timing.heat(yardstick, clock, plan.heat_s)
    timings = timing.take_turns(yardstick, steps, rounds=plan.rounds, clock=clock, reset=clear, calls=calls)
    for entry in entries:
        if entry.row["name"] in timings.failed:
            entry.row["skipped"] = timings.failed[entry.row["name"]]
    return timings


def _first_calls(entry: Entry, step: Step, device: torch.device, clock: Clock, clear: Step) -> float:
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
    one_call_ms, extra_mib = timing.probe(step, clock, entry.kept)
    if extra_mib is not None:
        entry.row["extra_mib"] = round(extra_mib, 1)
    return one_call_ms


def what_ran() -> dict[str, Any]:
    """Of the calls since the last look: which implementation each operator ran, and why no kernel where none did."""
    done = telemetry(reset=True)
    found: dict[str, Any] = {
        "implementation": {name: ", ".join(facts["implementations"]) for name, facts in done.items()}
    }
    if fallbacks := sorted({reason for facts in done.values() for reason in facts["fallbacks"]}):
        found["fallbacks"] = fallbacks
    return found


def _allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
