"""The operators that move bytes: `logp`, `ratio_kl`, `grpo_loss`, `swiglu`, `rotary`, masked reductions,
`group_advantage`.

Owns their measurement. The yardstick is a device copy: bytes read plus bytes written over its time is the bandwidth
that a plain kernel reaches.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rl_kernel.benchmarks.contender import what_ran
from rl_kernel.benchmarks.linear import Plan
from rl_kernel.benchmarks.stream_rivals import with_rivals
from rl_kernel.benchmarks.streams import CPU_SIZES, GPU_SIZES, STREAMS, Stream
from rl_kernel.benchmarks.targets import COPY_SHARE
from rl_kernel.benchmarks.timing import MIB, Clock, clock_of, heat, probe, reason_of, take_turns


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
                row |= share(stream.moved_bytes, samples.median, bandwidth, plan.judged and stream.has_target)
            rows.append(row)
        del streams, runnable
    best = min(copied_ms) if copied_ms else None
    return {"copy_gbs": round(2 * sizes.copy_bytes / best / 1e6, 1) if best else None, "rows": rows}


def share(moved_bytes: int, ms: float, copy_gbs: float, has_target: bool) -> dict[str, Any]:
    """GB/s of a row and its share of the copy bandwidth, against the target."""
    reached = moved_bytes / ms / 1e6
    row: dict[str, Any] = {"gbs": round(reached, 1), "share": round(reached / copy_gbs, 4)}
    if has_target:
        row["target"] = {"limit": COPY_SHARE}
        row["met"] = reached / copy_gbs >= COPY_SHARE
    return row


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
        if stream.truth is not None:
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
