"""Reads the records of a run as plain values: one dict per rollout, its evaluations, and its samples."""

from __future__ import annotations

import math
import os
import statistics
from pathlib import Path

from slime.tracking.run_summary import RunState, run_summary
from slime.tracking.samples import SampleRecord, read_samples, sample_rollouts
from slime.tracking.trackers import METRICS_FILE, RESERVED, MetricLines

Metrics = dict[str, float]


class Run:
    """The records of a run directory, while the run is running or after its end.

    Example::

        run = vime.Run("runs/tiny")
        rewards = [row["rollout/raw_reward"] for row in run.metrics]
        best = max(run.samples, key=lambda sample: sample.reward)
    """

    def __init__(self, run_dir: str | os.PathLike[str]) -> None:
        self.dir = Path(run_dir)
        """The run directory."""

    @property
    def state(self) -> RunState:
        """Returns the run's state: running, finished, failed or interrupted. Raises ValueError for a directory without
        a run."""
        return run_summary(self.dir).state

    @property
    def metrics(self) -> list[Metrics]:
        """Returns one dict per rollout, in order. It has the rollout's number as `rollout`, the metrics of generation
        and training, and the scores of the evaluation after the rollout. A metric of several optimizer steps is their
        mean. A value that is not finite is NaN."""
        rows, steps, last = dict[int, Metrics](), dict[int, list[Metrics]](), -1
        for key, step, values in self._lines():
            if key == "rollout/step":
                last = step
                rows[last] = rows.get(last, {}) | values  # a rollout may have several lines
            elif key == "train/step":
                last = max(last, 0)  # training on given responses may log no rollout
                steps.setdefault(last, []).append(values)
        scores = {row["rollout"]: row for row in self.evaluations}
        return [
            {"rollout": n, **scores.get(n, {}), **_means(steps.get(n, [])), **rows.get(n, {})}
            for n in sorted(rows.keys() | steps.keys())
        ]

    @property
    def evaluations(self) -> list[Metrics]:
        """Returns one dict per evaluation, in order. Its `rollout` is the last rollout before the evaluation, and -1
        for the evaluation before training."""
        found = dict[int, Metrics]()
        for key, step, values in self._lines():
            if key == "eval/step":
                found[step] = found.get(step, {"rollout": step - 1}) | values
        return list(found.values())

    @property
    def samples(self) -> list[SampleRecord]:
        """Returns the samples of the last rollout that the run directory has. --save-samples sets their number."""
        rollouts = sample_rollouts(self.dir)
        return self.samples_from(rollouts[-1]) if rollouts else []

    def samples_from(self, rollout: int) -> list[SampleRecord]:
        """Returns the samples of a rollout. Raises ValueError if the run directory lacks them."""
        return list(read_samples(self.dir, rollout))

    def _lines(self) -> list[tuple[str, int, Metrics]]:
        """Returns (step key, step, metrics) of each line of the metrics."""
        return [
            (
                row["step_key"],
                row["step"],
                {
                    name: math.nan if value is None else float(value)
                    for name, value in row.items()
                    if name not in RESERVED
                },
            )
            for row in MetricLines(self.dir / METRICS_FILE)
        ]

    def __repr__(self) -> str:
        return f"<vime run {self.dir}>"


def _means(rows: list[Metrics]) -> Metrics:
    """Returns the mean of each metric over the rows that have it."""
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: statistics.fmean(row[name] for row in rows if name in row) for name in names}
