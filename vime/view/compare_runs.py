"""Reads the runs that `vime compare` compares: two sides, each with one run or a configuration's seeds."""

from __future__ import annotations

import glob
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slime.config.secrets import mask_secrets
from slime.tracking.environment import ENVIRONMENT_FILE
from slime.tracking.kinds import EVENTS_FILE
from slime.tracking.run_files import Line, is_there, is_whole_number, read_object
from slime.tracking.run_summary import RunSummary, run_summary
from slime.tracking.trackers import METRICS_FILE
from vime.view.measures import config_flags, flatten
from vime.view.run_metrics import RunMetrics, Series, load_run

SEEDS = ("seed", "rollout_seed")
RUN_FILES = ("config.json", METRICS_FILE, EVENTS_FILE)
_OWN_DIR = "<run_dir>"


@dataclass(frozen=True)
class ComparedRun:
    """The content of a run directory. `summary` is None for a run without a journal, from an older version."""

    name: str
    config: dict[str, object]
    environment: dict[str, object]
    series: dict[str, Series]
    summary: RunSummary | None
    damaged: Counter[str] = field(default_factory=Counter)
    """Numbers of unreadable lines per file, which are left out."""

    @property
    def seeds(self) -> tuple[object, ...]:
        by_name = {path.rpartition(".")[2]: value for path, value in self.config.items()}
        seeds = (by_name.get(name) for name in SEEDS)
        return tuple(seed if seed is None or is_whole_number(seed) else str(seed) for seed in seeds)

    @property
    def state(self) -> str:
        return "unknown" if self.summary is None else self.summary.state


def find_runs(pattern: str) -> list[ComparedRun]:
    """Returns the runs of a side: one directory, or a pattern such as 'runs/a-seed-*', in the order of their names.

    Raises ValueError if no directory matches, or if a directory is not a run.
    """
    found = sorted(glob.glob(pattern)) if glob.has_magic(pattern) else [pattern]
    paths = [path for path in map(Path, found) if path.is_dir()]
    if not paths:
        raise ValueError(
            f"RUN must be a run directory, or a pattern in quotes that names some, got {pattern}; give the --run-dir "
            "of a run"
        )
    return [read_run(path) for path in paths]


def read_run(path: Path) -> ComparedRun:
    if not any(is_there(path, name) for name in RUN_FILES):
        raise ValueError(
            f"RUN must be a run directory, got {path} without {', '.join(RUN_FILES)}; give the --run-dir of a run"
        )
    config, environment = (_read(path, name) for name in ("config.json", ENVIRONMENT_FILE))
    metrics = load_run(path) if is_there(path, METRICS_FILE) else RunMetrics(path.name, {})
    summary = run_summary(path) if is_there(path, EVENTS_FILE) else None
    damaged = Counter({METRICS_FILE: metrics.damaged}) if summary is None else summary.damaged
    return ComparedRun(
        path.name,
        dict(flatten(_placed(config))),
        dict(flatten(environment)),
        metrics.series,
        summary,
        +damaged,
    )


def _read(path: Path, name: str) -> Line:
    """Reads a JSON object without secrets, which a file of an older version may contain."""
    found = mask_secrets(read_object(path, name))
    assert isinstance(found, dict)
    return found


def _placed(config: dict[str, Any]) -> dict[str, Any]:
    """Returns the configuration with `<run_dir>` instead of the run's own directory."""
    own_dir = config_flags(config).get("run_dir")
    run_dir = own_dir if isinstance(own_dir, str) else ""

    def without_run_dir(value: object) -> object:
        if isinstance(value, dict):
            return {name: without_run_dir(one) for name, one in value.items()}
        if isinstance(value, str) and run_dir and (value == run_dir or value.startswith(f"{run_dir}/")):
            return _OWN_DIR + value[len(run_dir) :]
        return value

    return {name: without_run_dir(value) for name, value in config.items()}


def pair_up(
    one: list[ComparedRun], other: list[ComparedRun]
) -> tuple[list[tuple[ComparedRun, ComparedRun]], str]:
    """Returns pairs of runs of the two sides, and a sentence on the pairing: by equal seeds, else in order."""
    seeds = [[run.seeds for run in side] for side in (one, other)]
    if set(seeds[0]) == set(seeds[1]) and all(len(set(side)) == len(side) for side in seeds):
        by_seed = {run.seeds: run for run in other}
        return [(run, by_seed[run.seeds]) for run in one], "Runs of equal seeds are pairs."
    pairs = list(zip(one, other, strict=False))
    left = [run.name for side in (one, other) for run in side[len(pairs) :]]
    more = f" Left out: {', '.join(left)}." if left else ""
    return pairs, f"The sides have different seeds, so runs are pairs in the order of their names.{more}"


def differing(
    one: Iterable[dict[str, object]], other: Iterable[dict[str, object]]
) -> dict[str, tuple[str, str]]:
    """Returns the values on both sides per path that differs. Commas separate the values of a side's runs."""
    sides = [list(one), list(other)]
    paths = dict.fromkeys(path for side in sides for leaves in side for path in leaves)
    found = {}
    for path in paths:
        values = [dict.fromkeys(_format_value(leaves, path) for leaves in side) for side in sides]
        if set(values[0]) != set(values[1]):
            found[path] = (", ".join(values[0]), ", ".join(values[1]))
    return found


def _format_value(leaves: dict[str, object], path: str) -> str:
    return str(leaves[path]) if path in leaves else "(absent)"
