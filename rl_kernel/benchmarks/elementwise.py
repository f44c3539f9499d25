"""The operators that move bytes, and beside them their PyTorch references, plain and compiled. Owns their measurement.

The yardstick is a device copy: bytes read plus bytes written, divided by its time, is the bandwidth of a plain kernel.
A rival is the call of our row itself with another implementation below it, so that inputs, arguments and gradients are
the same by construction.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from rl_kernel.benchmarks.contender import what_ran
from rl_kernel.benchmarks.linear import Plan
from rl_kernel.benchmarks.streams import CPU_SIZES, GPU_SIZES, STREAMS, Outputs, Stream
from rl_kernel.benchmarks.timing import MIB, Clock, clock_of, heat, probe, reason_of, take_turns
from rl_kernel.mode import using

COMPILED = ("ratio_kl", "grpo_loss", "swiglu", "rotary")
"""Operators whose reference is one function of tensors, which torch.compile takes whole."""


def run_elementwise(
    operators: Sequence[str],
    device: torch.device,
    plan: Plan,
    only: Sequence[str],
    rivals: Sequence[str] = (),
) -> dict[str, Any]:
    """Results of the named operators as plain data, with the copy bandwidth of the same run. `rivals`: families of
    which "reference" and "compile" are measured beside them."""
    sizes = GPU_SIZES if device.type == "cuda" else CPU_SIZES
    clock = clock_of(device)
    source = torch.ones(sizes.copy_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)

    def copy() -> None:
        target.copy_(source)

    copied_ms: list[float] = []
    rows = []
    for build in (build for name, build in STREAMS.items() if name in operators):
        # One operator at a time: the inputs of all of them together are tens of gigabytes.
        streams = [
            stream
            for stream in with_rivals(build(device, sizes), rivals)
            if not only or any(part in stream.name for part in only)
        ]
        found = {stream.name: _check(stream, clock) for stream in streams}
        runnable = {stream.name: stream.call for stream in streams if "skipped" not in found[stream.name]}

        def reset(streams: list[Stream] = streams) -> None:
            for stream in streams:
                stream.clear()

        heat(copy, clock, plan.heat_s / 4)
        timings = take_turns(copy, runnable, rounds=plan.rounds, clock=clock, reset=reset)
        copied_ms.append(timings.yardstick.median)
        bandwidth = 2 * sizes.copy_bytes / timings.yardstick.median / 1e6
        for stream in streams:
            row = found[stream.name]
            if stream.name in timings.failed:
                row["skipped"] = timings.failed[stream.name]
            if stream.name in timings.contenders:
                samples = timings.contenders[stream.name]
                row["ms"] = samples.each_as_json()
                reached = stream.moved_bytes / samples.median / 1e6
                row |= {"gbs": round(reached, 1), "share": round(reached / bandwidth, 4)}
            rows.append(row)
        del streams, runnable
    best = min(copied_ms) if copied_ms else None
    return {"copy_gbs": round(2 * sizes.copy_bytes / best / 1e6, 1) if best else None, "rows": rows}


def _check(stream: Stream, clock: Clock) -> dict[str, Any]:
    row: dict[str, Any] = {
        "name": stream.name,
        "operator": stream.operator,
        "moved_bytes": stream.moved_bytes,
    }
    if stream.against is not None:
        row["against"] = stream.against
    try:
        what_ran()
        outputs = stream.call()
        clock.finish()
        row |= what_ran()
        errors = [_largest(actual, truth) for actual, truth in stream.truth(outputs)]
        row["error"] = max(errors) if all(map(math.isfinite, errors)) else None
        returned = sum(
            out.untyped_storage().nbytes() for out in {out.data_ptr(): out for out in outputs}.values()
        )
        del outputs
        stream.clear()
        extra = probe(stream.call, clock, stream.gradients)[1]
        if extra is not None:
            row["extra_mib"] = round(extra - returned / MIB, 1)
    except Exception as error:  # border: an operator that cannot run is a row with the reason
        row["skipped"] = reason_of(error)
    stream.clear()
    return row


def _largest(actual: Tensor, truth: Tensor) -> float:
    """Largest difference, relative to truths above 1."""
    off = (actual.detach().double() - truth).abs() / truth.abs().clamp(min=1)
    return off.max().item()


def with_rivals(streams: Sequence[Stream], families: Sequence[str]) -> list[Stream]:
    """The rows, each with those of `families` ("reference", "compile") behind it that can be measured beside it."""
    found = []
    for stream in streams:
        found.append(stream)
        if "reference" in families and stream.repeats:
            found.append(_rival(stream, "reference", _reference(stream)))
        if "compile" in families and stream.operator in COMPILED:
            found.append(_rival(stream, "compile", _compiled(stream)))
    return found


def _rival(stream: Stream, family: str, call: Callable[[], Outputs]) -> Stream:
    name = f"{stream.name}: {family}"
    return replace(stream, name=name, operator="rival", call=call, against=stream.name)


def _reference(stream: Stream) -> Callable[[], Outputs]:
    def call() -> Outputs:
        with using("off"):
            return stream.call()

    return call


def _compiled(stream: Stream) -> Callable[[], Outputs]:
    """The reference alone is compiled: what counts calls around it would be compiled anew in every call."""

    def call() -> Outputs:
        with using("off"), _in_place_of_reference(stream.operator):
            return stream.call()

    return call


@contextmanager
def _in_place_of_reference(operator: str) -> Iterator[None]:
    module, name = importlib.import_module(f"rl_kernel.ops.{operator}"), f"{operator}_reference"
    plain = getattr(module, name)
    setattr(module, name, _compile(plain))
    try:
        yield
    finally:
        setattr(module, name, plain)


@cache
def _compile(function: Callable[..., Any]) -> Callable[..., Any]:
    # Static shapes, as those of the linear operators' rival.
    return torch.compile(function, dynamic=False)
