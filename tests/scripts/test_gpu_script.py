"""Runs scripts/test-gpu.sh without GPUs: which tests run on which GPU, which files are kept, and that Ctrl-C ends
all.

A shell script takes the part of Python and reports the number of GPUs.
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
event() { echo "$1" >>"$EVENTS"; }
until_there() { for ((i = 0; i < 600; i++)); do [[ ! -e "$1" ]] || return 0; sleep 0.05; done; exit 1; }
after() { # the word behind OPTION, the last one wins
    local word found="" next=""
    for word in "${words[@]}"; do [[ -z "$next" ]] || found=$word; [[ "$word" == "$1" ]] && next=1 || next=""; done
    echo "$found"
}
[[ "$1" != -P ]] || shift
words=("$@")
case "$*" in
    *device_count*) echo "$GPUS ${GIB:-140}" ;;
    "-m pytest "*)
        echo "asked $*"
        [[ -z "${SECONDS_OF_TESTS:-}" ]] || exec sleep "$SECONDS_OF_TESTS"
        sleep 0.5
        event tested ;;
    *make_model*)
        model=${!#}
        mkdir -p "$model/arithmetic"
        touch "$model/config.json" "$model/arithmetic/train.jsonl" ;;
    "- "*train.jsonl) echo "--input-key prompt" ;;
    -) ;;
    "-m vime train "*)
        event "train starts"
        echo "asked $*" >"$EVENTS.train"
        until_there "$(after --run-dir)/alone_from"
        event "train ends"
        exit "${TRAIN_ENDS:-0}" ;;
    "benchmarks/rollout_speed.py "*)
        event "rollout starts on $CUDA_VISIBLE_DEVICES"
        until_there "$(after --after)"
        event "rollout ends" ;;
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
    smi = tmp_path / "bin" / "nvidia-smi"
    smi.parent.mkdir()
    smi.write_text("#!/bin/bash\nfor i in 0 1 2 3; do echo $i, a GPU, 1 MiB, 0 MiB; done\n")
    smi.chmod(0o755)
    path = f"{smi.parent}{os.pathsep}{os.environ['PATH']}"
    events = str(tmp_path / "events")
    return {
        **kept,
        "PYTHON": str(python),
        "OUT": str(tmp_path / "out"),
        "PARTS": "tests",
        "PATH": path,
        "EVENTS": events,
    }


def run(environment: dict[str, str], gpus: int, status: int = 0) -> str:
    command = ["bash", str(ROOT / "scripts" / "test-gpu.sh")]
    done = subprocess.run(
        command, env={**environment, "GPUS": str(gpus)}, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


def collected(arguments: list[str]) -> Counter[str]:
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return Counter(line for line in done.stdout.splitlines() if "::" in line)


def sleeping(script: psutil.Process, seconds: str) -> list[psutil.Process]:
    found = []
    for child in script.children():
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended meanwhile
            if child.cmdline() == ["sleep", seconds]:
                found.append(child)
    return found


@pytest.mark.slow
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


ALL = "tests smoke rollout table"


@pytest.mark.parametrize(("gpus", "last"), [(2, 1), (4, 3)])
def test_the_parts_overlap_and_are_measured_alone(environment, gpus, last):
    said = run({**environment, "PARTS": ALL}, gpus)
    happened = Path(environment["EVENTS"]).read_text().splitlines()
    assert set(happened[-2:]) == {"train ends", "rollout ends"} and happened[-1] == "rollout ends"
    assert happened[:-2].count("tested") == 3
    assert happened.index("train starts") < happened.index("train ends")
    assert f"rollout starts on {last}" in happened[:-2]
    assert "other benchmarks/gpu_numbers.py" in said


@pytest.mark.parametrize("gpus", [1, 2])
def test_a_gpu_of_80_gib_runs_the_4b_after_the_tests_and_in_less_memory(environment, gpus):
    said = run({**environment, "PARTS": "tests smoke", "GIB": "79"}, gpus)
    happened = Path(environment["EVENTS"]).read_text().splitlines()
    assert set(happened[:-2]) == {"tested"} and happened[-2:] == ["train starts", "train ends"]
    flags = (Path(environment["EVENTS"] + ".train")).read_text()
    assert "--max-tokens-per-gpu 8192 " in flags and "--recompute-granularity full " in flags
    assert ("--offload-train" in flags) == (gpus == 1)
    assert "GPUs of 79 GiB: the 4B runs after the tests with --max-tokens-per-gpu 8192" in said


def test_a_gpu_that_is_too_small_for_the_4b_is_an_error(environment):
    said = run({**environment, "PARTS": "smoke", "GIB": "47"}, 1, status=2)
    assert "a GPU must have 78 GiB or more for the 4B, got 47 GiB" in said


def test_one_gpu_has_no_room_for_two_engines(environment):
    run({**environment, "PARTS": ALL}, 1)
    happened = Path(environment["EVENTS"]).read_text().splitlines()
    assert happened[-3:] == ["train ends", "rollout starts on 0", "rollout ends"]


def test_a_run_that_fails_keeps_no_part_waiting(environment, tmp_path):
    """OUT may also be a path relative to the current directory."""
    out = os.path.relpath(tmp_path / "out", ROOT)
    said = run({**environment, "PARTS": "smoke rollout", "TRAIN_ENDS": "1", "OUT": out}, 2, status=1)
    assert "test-gpu: failed: disaggregated" in said and "failed: rollout" not in said
    assert Path(environment["EVENTS"]).read_text().splitlines()[-1] == "rollout ends"
    assert (tmp_path / "out" / "disaggregated" / "alone_from").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_all_tests(environment, number):
    command = ["bash", str(ROOT / "scripts" / "test-gpu.sh")]
    environment = {**environment, "GPUS": "1", "SECONDS_OF_TESTS": "300"}
    started = subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # background tests ignore it
    )
    script, end = psutil.Process(started.pid), time.monotonic() + 30
    while len(children := sleeping(script, "300")) < 6:
        assert time.monotonic() < end, "six groups should run"
        time.sleep(0.1)
    os.killpg(started.pid, number)
    assert started.wait(30) == 128 + number
    _, alive = psutil.wait_procs(children, timeout=10)
    assert not alive
