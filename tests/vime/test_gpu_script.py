"""scripts/test-gpu.sh without GPUs: who would run which tests, what is kept, and that Ctrl-C leaves nothing behind.

A shell script stands in for Python, and says how many GPUs there are.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parents[2]
STAND_IN = """#!/bin/bash
case "$*" in
    *device_count*) echo "$GPUS" ;;
    *pytest*) echo "asked $*"; exec sleep "${SECONDS_OF_TESTS:-0}" ;;
    *) echo "other $*" ;;
esac
"""
MARKED = {1: "gpu and not multi_gpu", 2: "multi_gpu"}


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    python = tmp_path / "python"
    python.write_text(STAND_IN)
    python.chmod(0o755)
    kept = {k: v for k, v in os.environ.items() if k != "CUDA_VISIBLE_DEVICES"}
    return {**kept, "PYTHON": str(python), "OUT": str(tmp_path / "out"), "PARTS": "tests"}


def run(environment: dict[str, str], gpus: int) -> str:
    command = ["bash", str(ROOT / "scripts" / "test-gpu.sh")]
    done = subprocess.run(command, env={**environment, "GPUS": str(gpus)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def collected(arguments: list[str]) -> Counter[str]:
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return Counter(line for line in done.stdout.splitlines() if "::" in line)


def sleeping(script: psutil.Process) -> list[psutil.Process]:
    found = []
    for child in script.children():
        with contextlib.suppress(psutil.NoSuchProcess):  # a helper of the script, gone meanwhile
            if child.name() == "sleep":
                found.append(child)
    return found


@pytest.mark.parametrize("gpus", [1, 2])
def test_every_test_of_its_kind_is_in_one_group(environment, gpus):
    asked = re.findall(
        r"^asked -m pytest .*--require-gpu -m (.*?) (tests/gpu.*)$", run(environment, gpus), re.M
    )
    assert {marked for marked, _ in asked} == {MARKED[gpus]}
    found: Counter[str] = Counter()
    for marked, group in asked:
        words, named = group.partition(" -k ")[::2]
        found += collected(["-m", marked, *words.split(), *(["-k", named] if named else [])])
    assert found == collected(["-m", MARKED[gpus], "tests/gpu"])


def test_records_of_parts_that_do_not_run_are_kept(environment, tmp_path):
    kept = [tmp_path / "out" / name for name in ("colocate/metrics.jsonl", "rollout_speed.json")]
    for file in kept:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("{}")
    said = run({**environment, "PARTS": "table"}, 2)
    assert all(file.exists() for file in kept)
    assert f"operators_h200.json {kept[0].parent} {kept[1]} --out" in said


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_all_tests(environment, number):
    command = ["bash", str(ROOT / "scripts" / "test-gpu.sh")]
    environment = {**environment, "GPUS": "1", "SECONDS_OF_TESTS": "300"}
    started = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, start_new_session=True)
    script, end = psutil.Process(started.pid), time.monotonic() + 30
    while len(children := sleeping(script)) < 4:
        assert time.monotonic() < end, "four groups should run"
        time.sleep(0.1)
    os.killpg(started.pid, number)
    assert started.wait(30) == 128 + number
    _, alive = psutil.wait_procs(children, timeout=10)
    assert not alive
