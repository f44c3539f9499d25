"""Measures the bytes of tensors that are alive at once, as torch's profiler counts them on a CPU."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


def peak_bytes(work: Callable[[], Any], trace: Path) -> int:
    """Returns the most bytes that `work` held at once, beyond the bytes before it. Writes a trace to `trace`."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        kept = work()
    del kept
    profile.export_chrome_trace(str(trace))
    events = [e for e in json.loads(trace.read_text())["traceEvents"] if e["name"] == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda e: e["ts"]):
        held += event["args"]["Bytes"]
        peak = max(peak, held)
    return peak
