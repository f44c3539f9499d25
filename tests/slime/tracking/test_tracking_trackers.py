"""Tests metrics.jsonl, TensorBoard and W&B: their contents, and that a resumed run does not write them twice."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pandas as pd
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from slime.config import Config
from slime.tracking import make_trackers
from slime.tracking.trackers import JsonlTracker
from slime.tracking.trackers.wandb import choose_group


def make_config(**changes) -> Config:
    """Returns a config in which a rollout has 2 optimizer steps."""
    fields = {
        "num_steps_per_rollout": 2,
        "use_tensorboard": False,
        "tb_project_name": None,
        "tb_experiment_name": None,
        "use_wandb": False,
        "wandb_mode": "offline",
        "wandb_key": None,
        "wandb_host": None,
        "wandb_team": None,
        "wandb_group": "tiny",
        "wandb_project": "vime",
        "wandb_run_id": None,
        "wandb_dir": None,
        "disable_wandb_random_suffix": True,
        "wandb_always_use_train_step": False,
    } | changes
    return Config.from_flat(fields)


def log_rollouts(trackers, first: int, last: int, shift: float = 0.0) -> None:
    for step in range(first, last):
        trackers.log({"rollout/raw_reward": step / 10 + shift}, step=step, step_key="rollout/step")
        for i in (0, 1):
            metrics = {
                "train/loss": step + shift,
                "train/step": 2 * step + i,
            }  # the loop logs the step as well
            trackers.log(metrics, step=2 * step + i, step_key="train/step")
        trackers.log({"eval/gsm8k": step / 20 + shift}, step=step, step_key="eval/step")


def read_rows(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_jsonl_lines_are_flat_and_read_by_pandas(tmp_path):
    trackers = make_trackers(make_config(), tmp_path, resume_step=0)
    trackers.log({"rollout/raw_reward": 0.25, "perf/rollout_time": 2}, step=0, step_key="rollout/step")
    trackers.log({"train/loss": -0.5}, step=0, step_key="train/step")
    first, second = read_rows(tmp_path / "metrics.jsonl")  # flushed before close
    assert abs(first.pop("time") - second.pop("time")) < 60
    assert first == {
        "step_key": "rollout/step",
        "step": 0,
        "rollout/raw_reward": 0.25,
        "perf/rollout_time": 2.0,
    }
    assert second == {"step_key": "train/step", "step": 0, "train/loss": -0.5}
    trackers.close()
    frame = pd.read_json(tmp_path / "metrics.jsonl", lines=True)
    assert frame["train/loss"].dropna().tolist() == [-0.5]


def test_jsonl_stays_strict_json_when_values_are_not_finite(tmp_path):
    trackers = make_trackers(make_config(), tmp_path, resume_step=0)
    values = {"train/loss": math.nan, "train/grad_norm": math.inf, "train/ppo_kl": 0.5}
    trackers.log(values, step=0, step_key="train/step")
    text = (tmp_path / "metrics.jsonl").read_text()
    assert "NaN" not in text and "Infinity" not in text
    row = json.loads(text)
    assert row["train/loss"] is None and row["train/grad_norm"] is None and row["train/ppo_kl"] == 0.5
    assert row["nonfinite"] == {"train/loss": "nan", "train/grad_norm": "inf"}
    assert pd.read_json(tmp_path / "metrics.jsonl", lines=True)["train/loss"].isna().all()


def test_resume_withdraws_what_will_be_logged_again(tmp_path):
    trackers = make_trackers(make_config(), tmp_path, resume_step=0)
    log_rollouts(trackers, 0, 4)
    trackers.close()
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step_key": "train/step", "st')  # the process was killed while it wrote
    trackers = make_trackers(make_config(), tmp_path, resume_step=2)
    log_rollouts(trackers, 2, 5, shift=100.0)
    trackers.close()
    rows = read_rows(tmp_path / "metrics.jsonl")
    steps = {key: [r["step"] for r in rows if r["step_key"] == key] for key in ("rollout/step", "train/step")}
    assert steps == {"rollout/step": [0, 1, 2, 3, 4], "train/step": list(range(10))}
    losses = [row["train/loss"] for row in rows if "train/loss" in row]
    assert losses == [0, 0, 1, 1, 102, 102, 103, 103, 104, 104]
    assert [r["eval/gsm8k"] for r in rows if "eval/gsm8k" in r] == [0.0, 0.05, 100.1, 100.15, 100.2]
    dropped = read_rows(tmp_path / "metrics.dropped.jsonl")
    assert [row["train/loss"] for row in dropped if "train/loss" in row] == [2, 2, 3, 3]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.dropped.jsonl", "metrics.jsonl"]


def test_resume_keeps_a_whole_last_line_without_newline(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step_key": "train/step", "step": 0, "train/loss": 1.0}')
    tracker = JsonlTracker(path, {"train/step": 5})
    tracker.log({"train/loss": 2.0}, 5, "train/step")
    tracker.close()
    assert [row["train/loss"] for row in read_rows(path)] == [1.0, 2.0]


def test_damaged_line_is_moved_away(tmp_path, caplog):
    path = tmp_path / "metrics.jsonl"
    path.write_text(
        '{"step_key": "train/step", "step": 0}\nnot json\n{"step_key": "train/step", "step": 1}\n'
    )
    JsonlTracker(path, {}).close()
    assert "metrics.jsonl had 1 damaged lines, which are in metrics.dropped.jsonl now" in caplog.text
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [0, 1]
    assert (tmp_path / "metrics.dropped.jsonl").read_text() == "not json\n"


def test_wrong_calls_are_refused(tmp_path):
    trackers = make_trackers(make_config(), tmp_path, resume_step=0)
    with pytest.raises(
        ValueError, match="step_key must be one of rollout/step, train/step, eval/step, got 'step'"
    ):
        trackers.log({}, step=0, step_key="step")
    with pytest.raises(ValueError, match="metric train/loss must be one number, got list"):
        trackers.log({"train/loss": [1.0]}, step=0, step_key="train/step")
    with pytest.raises(ValueError, match=r"metric names must not be .* got \['step'\]"):
        trackers.log({"step": 1.0}, step=0, step_key="train/step")
    assert (tmp_path / "metrics.jsonl").read_text() == ""


def read_scalars(directory, tag: str) -> list[tuple[int, float]]:
    events = EventAccumulator(str(directory))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(tag)]


def test_tensorboard_keeps_names_and_purges_replayed_steps(tmp_path):
    config = make_config(use_tensorboard=True, tb_project_name="project", tb_experiment_name="one")
    trackers = make_trackers(config, tmp_path, resume_step=0)
    log_rollouts(trackers, 0, 3)
    root = tmp_path / "tensorboard" / "project" / "one"
    assert read_scalars(root / "rollout", "rollout/raw_reward")[2][0] == 2  # flushed before close
    trackers.close()
    trackers = make_trackers(config, tmp_path, resume_step=2)
    trackers.log({"train/loss": 50.0}, step=4, step_key="train/step")
    trackers.close()
    assert read_scalars(root / "train", "train/loss") == [(0, 0.0), (1, 0.0), (2, 1.0), (3, 1.0), (4, 50.0)]
    assert [step for step, _ in read_scalars(root / "rollout", "rollout/raw_reward")] == [0, 1]
    assert [step for step, _ in read_scalars(root / "eval", "eval/gsm8k")] == [0, 1]


def test_without_wandb_the_record_of_the_run_is_whole(tmp_path, monkeypatch):
    monkeypatch.setattr("slime.tracking.trackers.is_installed", lambda module: False)
    trackers = make_trackers(make_config(use_wandb=True), tmp_path, resume_step=0)
    trackers.log({"train/loss": 0.5}, step=0, step_key="train/step")
    trackers.close()
    assert [row["train/loss"] for row in read_rows(tmp_path / "metrics.jsonl")] == [0.5]


def test_a_run_that_resumes_keeps_its_name_in_wandb(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    flags = make_config(disable_wandb_random_suffix=False).logging
    first, again, other = (choose_group(flags, Path(folder)) for folder in ("a", tmp_path / "a", "b"))
    assert first == again != other and re.fullmatch("tiny_[0-9a-f]{8}", first)
    assert choose_group(make_config(wandb_group=None).logging, tmp_path) is None
    assert choose_group(make_config().logging, tmp_path) == "tiny"


def test_wandb_works_offline(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    config = make_config(use_wandb=True, wandb_key="secret-0123456789", wandb_always_use_train_step=True)
    monkeypatch.setenv("WANDB_SILENT", "true")
    trackers = make_trackers(config, tmp_path, resume_step=0)
    log_rollouts(trackers, 0, 3)
    wandb_run = trackers._trackers[1]._run
    assert wandb_run.config["logging"]["wandb_key"] == "***"
    assert wandb_run.name == wandb_run.group == "tiny"
    summary = dict(wandb_run.summary)
    trackers.close()
    assert summary["train/loss"] == 2.0 and summary["rollout/raw_reward"] == 0.2
    assert summary["train/step"] == 4  # rollout 2 begins at optimizer step 4
    written = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert b"rollout/raw_reward" in written and b"0123456789" not in written
