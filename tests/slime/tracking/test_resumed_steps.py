"""Tests optimizer steps of a run that resumes with another number of optimizer steps per rollout."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slime.config import Config
from slime.tracking import make_trackers


def logged(run_dir: Path, start: int, stop: int, steps: int) -> None:
    """Logs rollouts `start` to `stop` as `Reporter.step` does."""
    config = Config.from_flat(
        {"num_steps_per_rollout": steps, "global_batch_size": 8, "run_dir": str(run_dir)}
    )
    trackers = make_trackers(config, run_dir, start)
    for rollout in range(start, stop):
        trackers.log({"rollout/step": rollout}, rollout, "rollout/step")
        first = trackers.first_step(rollout, steps)
        for step in range(first, first + steps):
            trackers.log({"train/loss": float(rollout)}, step, "train/step")
        trackers.log({"perf/save_time": 1.0}, rollout, "rollout/step")  # the checkpoint's time
    trackers.close()


def rows(run_dir: Path) -> list[tuple[int, float]]:
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line["train/loss"]) for line in lines if "train/loss" in line]


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_no_row_vanishes_and_no_number_is_left_out(tmp_path, steps):
    logged(tmp_path, 0, 3, 2)
    logged(tmp_path, 2, 4, steps)  # the checkpoint is from rollout 1, so rollout 2 is trained again
    before = [(0, 0.0), (1, 0.0), (2, 1.0), (3, 1.0)]
    after = [(4 + i, 2.0 + i // steps) for i in range(2 * steps)]
    assert rows(tmp_path) == before + after
    logged(tmp_path, 4, 5, 2)
    assert rows(tmp_path) == before + after + [(4 + 2 * steps + i, 4.0) for i in range(2)]


def test_a_new_run_directory_begins_at_the_rollouts_steps(tmp_path):
    logged(tmp_path, 3, 4, 2)
    assert rows(tmp_path) == [(6, 3.0), (7, 3.0)]
