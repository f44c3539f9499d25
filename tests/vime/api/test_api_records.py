"""A run's records are one dict per rollout, its evaluations, and its samples."""

import json
import math
from pathlib import Path

import pytest

import vime


def lines(folder: Path, *rows: tuple[str, int, dict[str, float | None]]) -> vime.Run:
    text = "".join(
        json.dumps({"step_key": f"{key}/step", "step": step, "time": 1.0, **values}) + "\n"
        for key, step, values in rows
    )
    (folder / "metrics.jsonl").write_text(text)
    return vime.Run(folder)


def test_a_rollout_has_its_steps_its_later_lines_and_its_evaluation(tmp_path: Path) -> None:
    run = lines(
        tmp_path,
        ("eval", 0, {"eval/sums": 0.25}),
        ("rollout", 0, {"rollout/raw_reward": 0.5}),
        ("train", 0, {"train/loss": 1.0, "train/grad_norm": 3.0}),
        ("train", 1, {"train/loss": 3.0}),
        ("rollout", 0, {"perf/save_model_time": 7.0}),
        ("eval", 1, {"eval/sums": 0.5}),
        ("rollout", 1, {"rollout/raw_reward": None}),
    )
    first, second = run.metrics
    assert first == {
        **{"rollout": 0, "eval/sums": 0.5, "train/loss": 2.0, "train/grad_norm": 3.0},
        **{"rollout/raw_reward": 0.5, "perf/save_model_time": 7.0},
    }
    assert second["rollout"] == 1 and math.isnan(second["rollout/raw_reward"])
    assert run.evaluations == [{"rollout": -1, "eval/sums": 0.25}, {"rollout": 0, "eval/sums": 0.5}]


def test_a_run_without_rollouts_has_its_steps(tmp_path: Path) -> None:
    (row,) = lines(tmp_path, ("train", 0, {"train/loss": 1.0}), ("train", 1, {"train/loss": 2.0})).metrics
    assert row == {"rollout": 0, "train/loss": 1.5}


def test_a_run_that_has_not_begun_is_empty(tmp_path: Path) -> None:
    run = vime.Run(tmp_path)
    assert run.metrics == run.evaluations == run.samples == []
    with pytest.raises(ValueError, match="must have samples, got no .*3.jsonl"):
        run.samples_from(3)
    with pytest.raises(ValueError, match="RUN_DIR must"):
        _ = run.state


def test_the_samples_are_those_of_the_last_rollout(tmp_path: Path) -> None:
    (tmp_path / "samples").mkdir()
    for rollout in (0, 1):
        sample = {"place": 0, "index": 0, "group": 0, "prompt": "p", "response": f"r{rollout}", "label": "l"}
        sample |= {"reward": 1.0, "status": "completed", "versions": [0], "turns": 1, "tokens": []}
        text = [{"version": 1, "rollout": rollout, "of": 1}, sample]
        (tmp_path / "samples" / f"{rollout}.jsonl").write_text("\n".join(map(json.dumps, text)) + "\n")
    run = vime.Run(tmp_path)
    assert [one.response for one in run.samples] == ["r1"]
    assert [one.response for one in run.samples_from(0)] == ["r0"]
