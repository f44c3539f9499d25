"""The trainer's error when its device is out of memory: measured peaks, the estimate, and flags that lower memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from slime.config import Config
from slime.plan.memory_decision import engine_flag, lowering
from slime.plan.memory_estimate import Estimate
from slime.tracking.timers import Timers


@contextmanager
def explained(doing: str, config: Config, estimate: Estimate, timers: Timers) -> Iterator[None]:
    """Add to torch.OutOfMemoryError of the block: the peaks of all phases since the last `timers.flush`, the estimate,
    and the flags that lower memory."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        peaks = {k: v for k, v in timers.flush().items() if k.endswith("_peak_gib")}
        raise torch.OutOfMemoryError(_text(doing, config, estimate, peaks, str(error))) from error


def _text(doing: str, config: Config, estimate: Estimate, peaks: dict[str, float], said: str) -> str:
    by_phase = sorted(
        ((name.removeprefix("perf/").removesuffix("_peak_gib"), value) for name, value in peaks.items()),
        key=lambda pair: -pair[1],
    )
    measured = ", ".join(f"{name} {value:.2f}" for name, value in by_phase) or "none measured on this device"
    flags = lowering(config)
    if config.cluster.colocate:
        flags.append(engine_flag(config))
        if not config.cluster.offload_train or config.cluster.offload_train_parts:
            flags.append("--offload-train with all its parts")
    lines = [
        f"out of device memory while {doing}: {said}",
        f"peaks so far, GiB: {measured}; the estimate of a step was {estimate.peak / 2**30:.2f}",
        "what lowers it: " + "; ".join(flags),
    ]
    return "\n".join(lines)
