"""What one call spends its time on, kernel by kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from rl_kernel.benchmarks.timing import clock_of

WARM_CALLS = 3


def trace(call: Callable[[], Any], device: torch.device) -> tuple[float, list[tuple[str, float, int]]]:
    """(ms of one call, [(kernel, ms, launches)]); on a CPU, operators instead of kernels."""
    clock = clock_of(device)
    for _ in range(WARM_CALLS):
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
