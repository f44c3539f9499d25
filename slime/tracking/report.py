"""What the loop reports: metrics to the trackers, a line to the person watching. Owns counting steps."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from slime.protocols import TrainResult
from slime.tracking.console import StepLine, progress
from slime.tracking.metrics import as_floats
from slime.tracking.timers import Timers
from slime.tracking.trackers import Trackers, steps_per_rollout


class Reporter:
    """One per run, in the driver. `timers` are the driver's own; those of ranks arrive in their results.

    `pending` is a file for the metrics of a step whose checkpoint is being written: a run that is killed between the
    checkpoint and the log line would otherwise leave a hole in the curve, since the step is not trained again.
    """

    def __init__(self, config: Any, trackers: Trackers, line: StepLine, pending: Path | None = None) -> None:
        self.config, self.trackers, self.line, self.pending = config, trackers, line, pending
        self.timers = Timers()

    def recover(self, start_rollout_id: int) -> None:
        """Log what the last run in this directory left pending, if its checkpoint is the one that is resumed."""
        if self.pending is None or not self.pending.exists():
            return
        record = json.loads(self.pending.read_text(encoding="utf-8"))
        if record["rollout_id"] == start_rollout_id - 1:
            for row in record["rows"]:
                self.trackers.log(*row)
        self.pending.unlink()

    def before_save(self, rollout_id: int, rollout: dict[str, float], trained: TrainResult) -> None:
        """To be called before a checkpoint after `rollout_id` is written; `step` follows."""
        if self.pending is None:
            return
        rows = self._rows(rollout_id, {**rollout, **trained.rollout, **trained.perf}, trained)
        record = {"rollout_id": rollout_id, "rows": [(as_floats(metrics), *at) for metrics, *at in rows]}
        scratch = self.pending.with_suffix(".tmp")
        scratch.write_text(json.dumps(record), encoding="utf-8")
        os.replace(scratch, self.pending)

    def step(
        self, rollout_id: int, rollout: dict[str, float], trained: TrainResult, *, step_time_s: float
    ) -> None:
        """Log one rollout and its optimizer steps, and print its line."""
        perf = {**trained.perf, **self.timers.flush(), "perf/step_time": step_time_s}
        metrics = {**rollout, **trained.rollout, **perf}
        for row in self._rows(rollout_id, metrics, trained):
            self.trackers.log(*row)
        if self.pending is not None:
            self.pending.unlink(missing_ok=True)
        self.line.show(rollout_id, {**metrics, **trained.steps[-1]})

    def _rows(
        self, rollout_id: int, metrics: dict[str, float], trained: TrainResult
    ) -> list[tuple[Any, ...]]:
        """(metrics, step, step key) of a rollout and its optimizer steps."""
        first = rollout_id * steps_per_rollout(self.config)
        return [
            ({**metrics, "rollout/step": rollout_id}, rollout_id, "rollout/step"),
            *(
                ({**step, "train/step": first + offset}, first + offset, "train/step")
                for offset, step in enumerate(trained.steps)
            ),
        ]

    @contextmanager
    def bar(
        self, desc: str, unit: str, state: Callable[[], tuple[int, int]]
    ) -> Iterator[Callable[[], None] | None]:
        """A progress bar; yields what redraws it from `state()`, (done, total), or None without a terminal."""
        with progress(desc=desc, unit=unit) as drawn:

            def redraw() -> None:
                drawn.n, drawn.total = state()
                drawn.refresh()

            yield None if drawn.disable else redraw

    def rollout(self, rollout_id: int, metrics: dict[str, float]) -> None:
        """Log a rollout that nothing was trained on."""
        self.trackers.log({**metrics, "rollout/step": rollout_id}, rollout_id, "rollout/step")
        self.line.show(rollout_id, metrics)

    def evaluation(self, rollout_id: int, metrics: dict[str, float]) -> None:
        if metrics:
            self.trackers.log(metrics, rollout_id, "eval/step")
            scores = {name: value for name, value in metrics.items() if name.count("/") == 1}
            self.line.show_eval(rollout_id, scores)

    def close(self) -> None:
        self.trackers.close()
