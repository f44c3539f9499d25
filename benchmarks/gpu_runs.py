"""The inputs of gpu_numbers.py: run directories and result files."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from gpu_alone import ALONE_FROM

from slime.checkpoints.hf_config import read_hf_config
from slime.plan.model_shape import Shape
from slime.tracking.environment import ENVIRONMENT_FILE
from slime.tracking.trackers import METRICS_FILE
from vime.view.measures import config_flags
from vime.view.run_metrics import RunMetrics, load_run

LARGE = 3e9
"""Smallest number of parameters in layers with which a model counts for the targets of a Qwen3-4B (3.6e9)."""


@dataclass(frozen=True)
class GpuRun:
    """One run directory. `flags` is its resolved configuration with flattened sections. `model` is the model's
    config.json, {} if the file does not exist."""

    path: Path
    series: RunMetrics
    flags: dict[str, Any]
    model: dict[str, Any]

    @classmethod
    def read(cls, path: Path) -> GpuRun:
        flags = config_flags(json.loads((path / "config.json").read_text(encoding="utf-8")))
        try:
            model = read_hf_config(flags["hf_checkpoint"])
        except ValueError:
            model = {}
        return cls(path, load_run(path), flags, model)

    def median(self, *metrics: str, where_present: Sequence[str] = ()) -> float | None:
        """Returns the median over the steps of the sum of `metrics`, in steps that have all `metrics`. The first
        step, and steps that began before ALONE_FROM, do not count. The times `where_present` are added in steps that
        have them. None without such a step."""
        if not all(name in self.series.series for name in metrics):
            return None
        columns = [self._by_step(name) for name in metrics]
        began = {step + 1: end for step, end in self.step_ends.items()}
        steps = [
            s
            for s in sorted(set.intersection(*map(set, columns)))[1:]
            if began.get(s, 0.0) >= self.alone_from
        ]
        more = [self._by_step(name) for name in where_present]
        sums = [sum(c[s] for c in columns) + sum(c.get(s, 0.0) for c in more) for s in steps]
        return float(np.median(sums)) if sums else None

    def first(self, metric: str) -> float:
        return float(self.series.series[metric].values[0])

    def _by_step(self, name: str) -> dict[int, float]:
        found = self.series.series.get(name)
        return {} if found is None else dict(zip(found.steps.tolist(), found.values.tolist(), strict=True))

    @cached_property
    def step_ends(self) -> dict[int, float]:
        """Returns when each rollout's step ended, in seconds since 1970."""
        rows = [
            json.loads(line) for line in (self.path / METRICS_FILE).read_text(encoding="utf-8").splitlines()
        ]
        return {row["step"]: row["time"] for row in rows if row["step_key"] == "rollout/step"}

    @property
    def alone_from(self) -> float:
        file = self.path / ALONE_FROM
        return float(file.read_text(encoding="utf-8")) if file.exists() else 0.0

    @property
    def layer_parameters(self) -> int:
        """Number of parameters in the layers' matrices that a token uses. 0 if the model is unknown."""
        return Shape.of(self.model).active if self.model else 0

    @property
    def gpu(self) -> str | None:
        """Name of the first GPU of the host; None if the run did not record it."""
        file = self.path / ENVIRONMENT_FILE
        gpus = json.loads(file.read_text(encoding="utf-8")).get("gpus") if file.exists() else None
        return gpus[0]["name"] if gpus else None

    @property
    def trainers(self) -> int:
        return self.flags["actor_num_nodes"] * self.flags["actor_num_gpus_per_node"]

    @property
    def samples(self) -> int:
        """Number of samples per rollout."""
        return self.flags["rollout_batch_size"] * self.flags["n_samples_per_prompt"]


@dataclass(frozen=True)
class Sources:
    runs: tuple[GpuRun, ...]
    files: tuple[tuple[str, dict[str, Any]], ...]

    def large(self) -> Iterator[GpuRun]:
        return (run for run in self.runs if run.layer_parameters >= LARGE)


def read(paths: Sequence[Path]) -> Sources:
    """Reads run directories and JSON files. ValueError for a path that is neither."""
    runs, files = [], []
    for path in paths:
        if path.is_dir():
            runs.append(GpuRun.read(path))
            continue
        content = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise ValueError(f"PATH must be a run directory or hold a JSON object, got {path}")
        files.append((path.name, content))
    return Sources(tuple(runs), tuple(files))
