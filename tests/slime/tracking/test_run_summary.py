"""Tests the summary of a run, its end in the journal, and its samples."""

from __future__ import annotations

import json
import logging
import math
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from slime.tracking.events import Events
from slime.tracking.journal import read_events
from slime.tracking.kinds import EVENTS_FILE
from slime.tracking.run_record import RESERVE, recorded
from slime.tracking.run_summary import run_summary
from slime.tracking.samples import (
    read_samples,
    sample_rollouts,
    token_texts,
    write_samples,
    write_trained,
)
from slime.types import Sample


def metric_line(step: int, **metrics: float | None) -> str:
    return json.dumps({"step_key": "rollout/step", "step": step, "time": 1.0, **metrics}) + "\n"


def test_a_run_that_goes_on(tmp_path: Path) -> None:
    engines = Events("engines", str(tmp_path))
    with recorded(tmp_path, rollouts=10) as driver:
        assert (tmp_path / RESERVE).stat().st_size == 64 * 1024
        driver.add("start", rollout=0)
        engines.add("control_socket", socket="s", host="h", pid=1)
        for state in ("starting", "serving", "dead", "starting"):
            where = {"address": "http://a:1", "place": "gpu 0"} if state == "starting" else {"version": 0}
            engines.add("engine", model="policy", engine="engine-0", state=state, **where)
        for rollout in range(4):
            time.sleep(0.02)
            driver.add("step", rollout=rollout)
        driver.add("evaluation", rollout=4, scores={"tiny": 0.5})
        logging.getLogger("slime.some").warning("a group of %d is late", 3)
        driver.add("phase_begin", phase="train", rollout=4)
        (tmp_path / "metrics.jsonl").write_text(
            metric_line(2, **{"rollout/raw_reward": 0.5, "train/loss": 1.0})
            + metric_line(3, **{"rollout/raw_reward": 0.75, "train/loss": None})
        )
        driver.close()
        run = run_summary(tmp_path)
        assert (run.state, run.rollout, run.rollouts, run.progress) == ("running", 3, 10, 0.4)
        assert (
            run.step_s is not None and 0.015 < run.step_s < 5 and run.eta_s == pytest.approx(6 * run.step_s)
        )
        assert run.engines["engine-0"].state == "starting" and run.deaths == {"engine-0": 1}
        assert run.metrics["rollout/raw_reward"] == 0.75 and math.isnan(run.metrics["train/loss"])
        assert run.evaluations == {4: {"tiny": 0.5}} and [phase.name for phase in run.doing] == ["train"]
        assert [event["text"] for event in run.warnings] == ["a group of 3 is late"]
    run = run_summary(tmp_path)
    assert (run.state, run.cause, run.doing, run.eta_s) == ("finished", "", [], None)
    assert not (tmp_path / RESERVE).exists()


def test_the_error_and_the_interrupt_that_end_a_run(tmp_path: Path) -> None:
    with pytest.raises(OSError), recorded(tmp_path, rollouts=2):
        raise OSError("the reason")
    run = run_summary(tmp_path)
    assert (run.state, run.error_type, run.cause) == ("failed", "OSError", "the reason")
    with pytest.raises(KeyboardInterrupt), recorded(tmp_path, rollouts=2):
        raise KeyboardInterrupt
    assert run_summary(tmp_path).state == "interrupted"
    with recorded(tmp_path, rollouts=2):
        assert (run := run_summary(tmp_path)).state == "running" and not run.cause and not run.error_type


KILLED = """
import sys, time
from slime.tracking.run_record import recorded
with recorded(sys.argv[1], rollouts=2) as events:
    events.add("start", rollout=0)
    print("there", flush=True)
    time.sleep(100)
"""


def test_a_run_whose_driver_was_killed_has_failed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", KILLED, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdout is not None and driver.stdout.readline() == "there\n"
        assert run_summary(tmp_path).state == "running"
        driver.send_signal(signal.SIGKILL)
    run = run_summary(tmp_path)
    assert run.state == "failed" and f"process {driver.pid}, ended without a word" in run.cause


def test_a_run_of_an_older_version_and_one_of_another_host(tmp_path: Path) -> None:
    def line(kind: str, seconds: float, **fields: object) -> str:
        moment = time.time() - seconds
        return json.dumps({"time": moment, "source": "driver", "kind": kind, **fields}) + "\n"

    old = line("start", 9000, rollout=0) + line("step", 8000, rollout=0)
    (tmp_path / EVENTS_FILE).write_text(old)
    (tmp_path / "config.json").write_text(json.dumps({"num_rollout": 1}))
    assert run_summary(tmp_path).state == "finished"
    (tmp_path / "config.json").write_text(json.dumps({"num_rollout": 5}))
    run = run_summary(tmp_path)
    assert (
        run.state == "failed" and "no event for 133 minutes; its journal is of an older version" in run.cause
    )
    there = {"host": "elsewhere", "pid": 1, "born": 1, "rollouts": 5}
    (tmp_path / EVENTS_FILE).write_text(line("run", 30, **there))
    assert run_summary(tmp_path).state == "running"
    (tmp_path / EVENTS_FILE).write_text(line("run", 3000, **there))
    assert "no event for 50 minutes; its driver was on elsewhere" in run_summary(tmp_path).cause


def test_warnings_of_one_line_of_code_are_counted_to_twenty(tmp_path: Path) -> None:
    with recorded(tmp_path, rollouts=1):
        for number in range(30):
            logging.getLogger("a").warning("number %d", number)
        logging.getLogger("b").error("another")
        logging.getLogger("b").info("not told")
    texts = [event["text"] for event in read_events(tmp_path, ("warning",))]
    assert texts == [*(f"number {number}" for number in range(20)), "another"]


def a_sample(place: int) -> Sample:
    sample = Sample(index=10 + place, group_index=place // 2, prompt="<b>why</b>", response="abc", label="c")
    sample.tokens, sample.response_length, sample.loss_mask = [1, 2, 3, 4, 5], 4, [1, 0, 1, 1]
    sample.rollout_log_probs, sample.reward, sample.weight_versions = [-0.5, 0.0, -0.25, -1.0], 1.0, [3]
    sample.status = Sample.Status.COMPLETED
    return sample


def test_samples_of_a_rollout_and_what_the_trainer_adds(tmp_path: Path) -> None:
    text_of = token_texts(lambda ids: f"<{ids[0]}>")
    write_samples(tmp_path, 7, [a_sample(place) for place in range(8)], (0, 4), text_of)
    first, second = read_samples(tmp_path, 7)
    assert (first.place, first.index, second.index, first.prompt, first.advantage) == (
        0,
        10,
        14,
        "<b>why</b>",
        None,
    )
    assert first.turns == 2 and first.versions == [3] and first.status == "completed" and first.reward == 1.0
    assert first.tokens[2] == ("<4>", 4, 1, -0.25, None)
    write_trained(tmp_path, 7, 1, [{"place": 4, "advantage": 0.5, "log_probs": [-0.5, -0.1, -0.2, -1.0]}])
    first, second = read_samples(tmp_path, 7)
    assert first.advantage is None and second.advantage == 0.5
    assert [token.trainer for token in second.tokens] == [-0.5, -0.1, -0.2, -1.0]
    assert sample_rollouts(tmp_path) == [7]
    path = tmp_path / "samples" / "7.jsonl"
    path.write_text(path.read_text()[:-20])
    assert [sample.place for sample in read_samples(tmp_path, 7)] == [0]
    path.write_text('{"version": 9}\n')
    with pytest.raises(ValueError, match="must be of version 1 or older, got 9"):
        list(read_samples(tmp_path, 7))
    with pytest.raises(ValueError, match="the rollout must have samples, got no .*8.jsonl; --save-samples"):
        list(read_samples(tmp_path, 8))
