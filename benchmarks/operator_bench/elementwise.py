"""Measures the operators that move bytes, and their PyTorch references, plain and compiled.

The reference operation is a device copy: bytes read plus bytes written, divided by its time, is the bandwidth of a
plain kernel. A rival is the same call as our row with another implementation, so inputs, arguments and gradients are
the same.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from operator_bench.streams import CPU_SIZES, GPU_SIZES, STREAMS, Outputs, Stream
from operator_bench.timing import Entry, Plan, measure
from rl_kernel.host import Facts
from rl_kernel.mode import using

COMPILED = ("ratio_kl", "grpo_loss", "swiglu", "rotary")
"""Operators whose reference is one function of tensors, which torch.compile compiles as a whole."""


def run_elementwise(
    operators: Sequence[str],
    device: torch.device,
    plan: Plan,
    only: Sequence[str],
    rivals: Sequence[str],
) -> Facts:
    """Returns the results of the named operators as plain data, with the copy bandwidth of the same run. `rivals` are
    families; only "reference" and "compile" are measured."""
    sizes = GPU_SIZES if device.type == "cuda" else CPU_SIZES
    source = torch.ones(sizes.copy_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)

    def copy() -> None:
        target.copy_(source)

    copied_ms: list[float] = []
    rows: list[Facts] = []
    for build in (build for name, build in STREAMS.items() if name in operators):
        # One operator at a time, because the inputs of all operators are tens of gigabytes.
        streams = [
            stream
            for stream in with_rivals(build(device, sizes), rivals)
            if not only or any(part in stream.name for part in only)
        ]

        def clear(streams: list[Stream] = streams) -> None:
            for stream in streams:
                stream.clear()

        entries = [_entry(stream) for stream in streams]
        timings = measure(entries, copy, device, replace(plan, heat_s=plan.heat_s / 4), clear)
        copied_ms.append(timings.yardstick.median)
        bandwidth = 2 * sizes.copy_bytes / timings.yardstick.median / 1e6
        for entry in entries:
            if (samples := timings.contenders.get(entry.row["name"])) is not None:
                reached = entry.row["moved_bytes"] / samples.median / 1e6
                entry.row["ms"] = samples.each_as_json()
                entry.row.update({"gbs": round(reached, 1), "share": round(reached / bandwidth, 4)})
            rows.append(entry.row)
        del streams, entries, clear
    return {"copy_gbs": round(2 * sizes.copy_bytes / min(copied_ms) / 1e6, 1), "rows": rows}


def _entry(stream: Stream) -> Entry:
    row = {"name": stream.name, "operator": stream.operator, "moved_bytes": stream.moved_bytes}
    row |= {"against": stream.against} if stream.against is not None else {}

    def error(outputs: Outputs) -> Facts:
        found = [_largest(actual, truth) for actual, truth in stream.truth(outputs)]
        return {"error": max(found) if all(map(math.isfinite, found)) else None}

    def kept(outputs: Outputs) -> list[Tensor]:
        return [*{out.data_ptr(): out for out in outputs}.values(), *stream.gradients()]

    return Entry(row, lambda: stream.call, error, kept)


def _largest(actual: Tensor, truth: Tensor) -> float:
    """Returns the largest difference, relative to true values above 1."""
    off = (actual.detach().double() - truth).abs() / truth.abs().clamp(min=1)
    return off.max().item()


def with_rivals(streams: Sequence[Stream], families: Sequence[str]) -> list[Stream]:
    """Returns the rows. Each row is followed by its rivals of `families` ("reference", "compile")."""
    found = []
    for stream in streams:
        found.append(stream)
        if "reference" in families and stream.repeats:
            found.append(_rival(stream, "reference"))
        if "compile" in families and stream.operator in COMPILED:
            found.append(_rival(stream, "compile"))
    return found


def _rival(stream: Stream, family: str) -> Stream:
    def call() -> Outputs:
        with using("off"), _compiled_reference(stream.operator) if family == "compile" else nullcontext():
            return stream.call()

    name = f"{stream.name}: {family}"
    return replace(stream, name=name, operator="rival", call=call, against=stream.name)


@contextmanager
def _compiled_reference(operator: str) -> Iterator[None]:
    """Compiles only the reference, because the code that counts calls would be compiled again in every call."""
    module, name = importlib.import_module(f"rl_kernel.ops.{operator}"), f"{operator}_reference"
    plain = getattr(module, name)
    setattr(module, name, _compile(plain))
    try:
        yield
    finally:
        setattr(module, name, plain)


@cache
def _compile(function: Callable[..., Any]) -> Callable[..., Any]:
    # The shapes are static, as for the rival of the linear operators.
    return torch.compile(function, dynamic=False)
