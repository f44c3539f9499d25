"""Tests the rollout benchmark against an engine that answers at once; tests/e2e runs it against vLLM."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import make_tiny_model
import psutil
import pytest
from process_names import command_line
from rollout_speed import CLIENT, LOG_PROBS, OURS, RAW, main

ROOT = Path(__file__).parents[2]


def until(condition: Callable[[], Any]) -> Any:
    end = time.monotonic() + 60
    while not (value := condition()):
        assert time.monotonic() < end
        time.sleep(0.05)
    return value


def test_every_contender_makes_every_token(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_tiny_model.main([str(tmp_path)])
    out = tmp_path / "out.json"
    sizes = ["--requests", "8", "--group", "4", "--prompt-tokens", "12", "--response-tokens", "20"]
    argv = ["--model", str(tmp_path / "base"), "--device", "cpu", "--instant", "--rounds", "2", *sizes]
    assert main([*argv, "--out", str(out)]) == 0
    found = json.loads(out.read_text())
    assert found["engine"] == "instant" and found["requests"] == 8
    assert set(found["turns"]) == {OURS, RAW, LOG_PROBS, CLIENT}
    assert all(len(turns) == 2 for turns in found["turns"].values())  # the warm-up round is left out
    # A turn's speed is 8 x 20 tokens divided by its seconds, and the median of two turns is their mean.
    speed = {name: sum(160 / turn["seconds"] for turn in turns) / 2 for name, turns in found["turns"].items()}
    assert found["tokens_per_s"] == pytest.approx(speed)
    for name in (RAW, LOG_PROBS, CLIENT):
        assert found["ours_to"][name] == pytest.approx(speed[OURS] / speed[name])
    assert str(tmp_path) not in found["machine"]["command"]
    assert "8 requests at a time, 12 + 20 tokens each" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("ends_by", ["the file", "SIGTERM"])
def test_it_waits_for_a_file_and_leaves_nothing_behind(tmp_path: Path, ends_by: str) -> None:
    make_tiny_model.main([str(tmp_path)])
    (tmp_path / "tmp").mkdir()
    now, out = tmp_path / "now", tmp_path / "out.json"
    command = [
        sys.executable,
        "benchmarks/rollout_speed.py",
        "--model",
        str(tmp_path / "base"),
        "--device",
        "cpu",
    ]
    command += [
        "--instant",
        "--requests",
        "2",
        "--group",
        "2",
        "--prompt-tokens",
        "12",
        "--response-tokens",
        "2",
    ]
    command += ["--rounds", "1", "--after", str(now), "--out", str(out)]
    waiting = subprocess.Popen(command, cwd=ROOT, env={**os.environ, "TMPDIR": str(tmp_path / "tmp")})
    (engine,) = until(
        lambda: [p for p in psutil.Process(waiting.pid).children() if "instant" in command_line(p)]
    )
    time.sleep(1)
    assert waiting.poll() is None and not out.exists()
    now.touch() if ends_by == "the file" else waiting.terminate()
    assert (waiting.wait(60) == 0) == out.exists() == (ends_by == "the file")
    until(lambda: not engine.is_running())
    assert not list((tmp_path / "tmp").glob("vime-bench-*"))


def test_user_errors_are_one_line_and_exit_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_tiny_model.main([str(tmp_path)])
    capsys.readouterr()
    model = ["--model", str(tmp_path / "base"), "--device", "cpu", "--instant"]
    for argv, message in (
        (["--model", "nowhere"], "--hf-checkpoint must be a directory with a config.json, got nowhere"),
        ([*model, "--lrr", "1"], "--lrr is not a known flag; did you mean --lr?"),
        (
            [*model, "--out", "nowhere/o.json"],
            "--out must name a file in a folder that exists, got nowhere/o.json",
        ),
    ):
        assert main(argv) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"rollout_speed: {message}")


def test_groups_must_fill_the_requests(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--model", "any", "--requests", "9", "--group", "4"])
    assert "--requests must be a multiple of --group 4, got 9" in capsys.readouterr().err
