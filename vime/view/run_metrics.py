"""Reads a run's metrics.jsonl as arrays, and computes the values for pictures. Draws nothing."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from slime.tracking.metrics import is_score
from slime.tracking.run_files import is_there
from slime.tracking.trackers import METRICS_FILE, RESERVED, MetricLines

UNITS = {"rollout/step": "rollout", "train/step": "optimizer step", "eval/step": "rollout"}

# The parts of a step in order: a part of the picture -> the times (perf/{name}_time) that it adds up. The times do not
# overlap, and their sum is the step. docs/profile.md describes each time. `save_model` follows the step.
TIME_PARTS: dict[str, tuple[str, ...]] = {
    "waiting for the rollout": ("train_wait",),
    "taking turns": ("sleep", "wake_up", "onload", "offload"),
    "data": ("handover", "data_preprocess", "pack"),
    "reference log-probs": ("ref_log_probs",),
    "old log-probs": ("log_probs",),
    "values": ("values", "columns_wait"),
    "forward": ("forward",),
    "policy loss": ("advantages", "policy_loss"),
    "backward": ("backward",),
    "waiting for pipeline stages": ("pipeline_wait",),
    "optimizer": ("reduce_grads", "optimizer", "ref_model_update"),
    "weights to engines": ("update_weights",),
    "metrics, audit, trace": ("step_metrics", "rollout_metrics", "consistency", "profile"),
}
UNMEASURED = "not measured"
TIME_METRICS = tuple(f"perf/{name}_time" for names in TIME_PARTS.values() for name in names)
_TOLERANCE = 0.02  # share of a step by which the sum of its parts may differ from its measured time


@dataclass(frozen=True)
class Series:
    """A run's metric: `steps` [N] int, `values` [N] float64 (NaN if not finite), and the unit of the x-axis."""

    steps: np.ndarray
    values: np.ndarray
    unit: str


@dataclass(frozen=True)
class RunMetrics:
    name: str
    series: dict[str, Series]
    damaged: int = 0
    """Number of unreadable lines, which are left out."""

    def eval_names(self) -> list[str]:
        """Returns each evaluation set's score, `eval/{name}`, without the metrics derived from it."""
        return sorted(name for name in self.series if is_score(name, self.series))


@dataclass(frozen=True)
class StepTimes:
    """`steps` [N]; `parts` {name in TIME_PARTS: seconds [N]}; `whole` [N] seconds of the step, None if not recorded."""

    steps: np.ndarray
    parts: dict[str, np.ndarray]
    whole: np.ndarray | None


def load_run(run_dir: Path) -> RunMetrics:
    """Reads `run_dir`/metrics.jsonl. Damaged lines are counted. Raises ValueError if the file is missing, has no
    metric, or cannot be read."""
    path = Path(run_dir) / METRICS_FILE
    if not is_there(run_dir, METRICS_FILE):
        raise ValueError(
            f"RUN_DIR must hold {METRICS_FILE}, got {run_dir} without it; name the directory of a run"
        )
    columns: dict[str, tuple[list[int], list[float], str]] = {}
    lines = MetricLines(path)
    for row in lines:
        for name in row.keys() - RESERVED:
            steps, values, _ = columns.setdefault(name, ([], [], UNITS[row["step_key"]]))
            steps.append(row["step"])
            values.append(float("nan") if row[name] is None else float(row[name]))
    if not columns:
        held = f"{lines.damaged} damaged lines in" if lines.damaged else "an empty"
        raise ValueError(f"RUN_DIR must hold metrics, got {held} {path}; wait for the first step to end")
    series = {name: _sorted_series(*column) for name, column in columns.items()}
    return RunMetrics(Path(run_dir).resolve().name, series, lines.damaged)


def _sorted_series(steps: list[int], values: list[float], unit: str) -> Series:
    order = np.argsort(steps, kind="stable")
    return Series(np.asarray(steps)[order], np.asarray(values, dtype=np.float64)[order], unit)


def running_mean(values: np.ndarray, window: int) -> np.ndarray:
    """Returns the mean over the `window` (odd) values around each value, without NaNs. The window is smaller at the
    ends. [N] -> [N]"""
    half = window // 2
    out = np.full(len(values), np.nan)
    for i in range(len(values)):
        near = values[max(0, i - half) : i + half + 1]
        if np.isfinite(near).any():
            out[i] = np.nanmean(near)
    return out


def smoothing_window(count: int) -> int:
    """Returns an odd window of about a tenth of `count` steps, at least 3."""
    return max(3, count // 10 // 2 * 2 + 1)


def step_times(run: RunMetrics) -> StepTimes | None:
    """Returns the parts of the steps' times, or None if the run timed no part.

    A part that was timed in some steps counts as 0 in the others (a reference model update). UNMEASURED is the rest of
    a step's time. It is present if the rest is more than 2 % in at least one step.
    """
    present = [run.series[name] for name in TIME_METRICS if name in run.series]
    if not present:
        return None
    steps = np.unique(np.concatenate([series.steps for series in present]))
    parts: dict[str, np.ndarray] = {}
    for part, names in TIME_PARTS.items():
        for series in (run.series[metric] for n in names if (metric := f"perf/{n}_time") in run.series):
            seconds = parts.setdefault(part, np.zeros(len(steps)))
            seconds[np.searchsorted(steps, series.steps)] += np.nan_to_num(series.values)
    whole = run.series.get("perf/step_time")
    if whole is None or not np.isin(steps, whole.steps).all():
        return StepTimes(steps, parts, None)
    total = whole.values[np.searchsorted(whole.steps, steps)]
    rest = total - np.sum(list(parts.values()), axis=0)
    if (rest > _TOLERANCE * total).any():
        parts[UNMEASURED] = np.clip(rest, 0, None)
    return StepTimes(steps, parts, total)
