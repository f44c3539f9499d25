"""Step time and throughput over a run: the percentiles of what its steps took."""

from __future__ import annotations

import numpy as np

PERCENTILES = (50, 90, 99)


class StepFigures:
    """Figures of each step, and their percentiles over the steps so far.

    Left out of the percentiles: the first step of this start of the run (it compiles, allocates and warms up), and
    steps that `add` is told not to count (traced ones). A resumed run counts anew.
    """

    def __init__(self, gpus: int) -> None:
        self._gpus = gpus
        self._first = True
        self._counted: dict[str, list[float]] = {}

    def add(self, step_time_s: float, tokens: int, *, count: bool = True) -> dict[str, float]:
        """perf/step_tokens_per_sec and perf/step_tokens_per_gpu_per_sec of one step, and _p50, _p90, _p99 of both and
        of perf/step_time over the counted steps (none before there is one).

        `tokens`: prompt and response tokens of all samples that the step trained on; with 0, only times are told.
        pNN is the value that NN % of the steps do not exceed (linear between neighbours): of a time the high
        percentiles are the slow steps, of a throughput the fast ones.
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
