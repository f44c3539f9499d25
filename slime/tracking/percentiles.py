"""Computes percentiles of step time and throughput over a run."""

from __future__ import annotations

import numpy as np

PERCENTILES = (50, 90, 99)


class StepFigures:
    """Computes each step's time and throughput, and their percentiles over the steps so far.

    The percentiles exclude the first step after each start of the run (it compiles, allocates and warms up) and steps
    with `count=False` (traced steps). A resumed run starts with no counted steps.
    """

    def __init__(self, gpus: int) -> None:
        self._gpus = gpus
        self._first = True
        self._counted: dict[str, list[float]] = {}

    def add(self, step_time_s: float, tokens: int, *, count: bool = True) -> dict[str, float]:
        """Returns perf/step_tokens_per_sec and perf/step_tokens_per_gpu_per_sec of a step, and _p50, _p90, _p99 of
        these and of perf/step_time over the counted steps (absent before the first counted step).

        `tokens` is the number of prompt and response tokens of the samples that the step trained on. With 0, only times
        are returned. NN % of the steps do not exceed pNN (linear between neighbours). High percentiles of a time are
        the slow steps; high percentiles of a throughput are the fast steps.
        """
        figures = {"perf/step_time": step_time_s}
        if tokens:
            figures["perf/step_tokens_per_sec"] = tokens / step_time_s
            figures["perf/step_tokens_per_gpu_per_sec"] = tokens / step_time_s / self._gpus
        if count and not self._first:
            for name, value in figures.items():
                self._counted.setdefault(name, []).append(value)
        self._first = False
        over_run = {
            f"{name}_p{p}": float(value)
            for name, values in self._counted.items()
            for p, value in zip(PERCENTILES, np.percentile(values, PERCENTILES), strict=True)
        }
        return figures | over_run
