"""Implements --profile-steps: PyTorch traces of the training of selected rollouts, on every trainer rank.

The ranges in a trace are the spans of the rank's `Timers`. A rollout without a trace costs one comparison.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from slime.tracking.timers import Timers

if TYPE_CHECKING:
    import torch


def trace_path(run_dir: str | Path, rank: str, rollout_id: int, part: str = "") -> Path:
    return Path(run_dir).resolve() / "profile" / f"{rank}-rollout-{rollout_id}{part and f'-{part}'}.json.gz"


class StepProfiler:
    """Traces the training of rollouts on a trainer rank with the name `rank`. `steps`: the rollouts to trace. The spans
    of `timers` become ranges of the trace."""

    def __init__(
        self, steps: range, run_dir: str | Path, rank: str, timers: Timers, device: torch.device
    ) -> None:
        self._steps, self._run_dir, self._rank = steps, run_dir, rank
        self._timers, self._device = timers, device

    @contextmanager
    def around(self, rollout_id: int, part: str = "") -> Iterator[None]:
        """Traces the block if `rollout_id` is selected, and writes the file if the block ends without an error.

        `part` is the name of a part of the rollout's training, for the name of the file. The profiler's own time to
        start, stop and write is measured as `profile`. A trace holds the host's operators with the shapes of their
        tensors, and every GPU kernel.
        """
        if rollout_id not in self._steps:
            yield
            return
        from torch.profiler import ProfilerActivity, profile

        activities = [ProfilerActivity.CPU]
        if self._device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        profiler = profile(activities=activities, record_shapes=True)
        with self._timers.measure("profile"):
            profiler.start()
        self._timers.tracing = True
        try:
            yield
        finally:
            self._timers.tracing = False
            with self._timers.measure("profile"):
                profiler.stop()
        path = trace_path(self._run_dir, self._rank, rollout_id, part)
        with self._timers.measure("profile"):
            path.parent.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(path))
        print(f"trace of rollout {rollout_id}: {path}", flush=True)
