"""Runs of `vime bench`: order, records, failures, interruption, resuming. The runs are those of bench_run_double.py,
which are real except for the training; tests/e2e/runs/test_bench_tiers.py has real runs. Only the test of an
interruption starts processes."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import bench_run_double
import pytest
from bench_cases import packages
from switch_bench import planning, running
from switch_bench.planning import BenchPlan, make_plan
from switch_bench.record import BASELINE, RL_KERNEL, Record, Switch, all_repeats, read
from switch_bench.run_dirs import read_repeat, read_steps
from switch_bench.running import execute
from switch_bench.settings import read_settings
from train_fixtures import script

from slime.tracking.metrics import LOGPROB_DIFF, LOGPROB_DIFF_MAX
from vime.commands.bench import BENCHMARKS
from vime.run.lock import LOCK_FILE, lock

STEPS = 3
FILE = """
name: runs
model: {{path: {model}}}
data: {model}/arithmetic/train.jsonl
flags: {{device: cpu, colocate: true, actor-num-gpus-per-node: 1, input-key: prompt, label-key: label, rm-type: random,
  rollout-batch-size: 4, n-samples-per-prompt: 2, num-steps-per-rollout: 2, rollout-max-response-len: 8,
  use-dynamic-batch-size: true, max-tokens-per-gpu: 256}}
steps: {steps}
repeats: 2
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("bench") / "model"
    script("make_model").main(["--arch", "qwen3-tiny", "--no-weights", "--arithmetic", str(folder)])
    return folder


class Bench:
    """A benchmark of four runs in a folder, its plan, and the orders of its runs."""

    def __init__(self, folder: Path, model: Path) -> None:
        folder.mkdir(exist_ok=True)
        self.out, self.orders = folder / "out", folder / "orders"
        self.file = folder / "runs.yaml"
        self.file.write_text(FILE.format(model=model, steps=STEPS))
        self.order()

    def order(self, **runs: dict) -> None:
        """Stores orders for runs: `baseline_1` has the orders of baseline-1, see bench_run_double.py."""
        named = {re.sub(r"_(\d)$", r"-\1", name): what for name, what in runs.items()}
        self.orders.write_text(json.dumps(named))

    def plan(self, tier: str = "e2e", **line) -> BenchPlan:
        return make_plan(tier, read_settings(self.file).with_line(**line), self.out)

    def run(self, tier: str = "e2e", **line) -> int:
        return execute(self.plan(tier, **line), "vime bench e2e runs.yaml")

    def started(self) -> list[str]:
        """Returns names of the runs started since the last call."""
        path = self.orders.with_suffix(".started")
        names = path.read_text().split() if path.exists() else []
        path.unlink(missing_ok=True)
        return names

    def record(self) -> Record:
        return read(self.out)


@pytest.fixture
def bench(tmp_path, model, monkeypatch) -> Bench:
    made = Bench(tmp_path, model)
    in_a_process = running._run

    def run(command: list[str], log: Path, python_path: str) -> int:
        """Runs the run of `command` in this process, which saves the seconds of a start. A model is made in this
        process, too."""
        if command[:2] != [*planning.ENTRY]:
            return in_a_process(command, log, python_path)
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("w") as file, contextlib.redirect_stdout(file):
            return bench_run_double.main(command[2:]) or 0

    monkeypatch.setattr(planning, "ENTRY", (sys.executable, bench_run_double.__file__))
    monkeypatch.setattr(running, "_run", run)
    monkeypatch.setattr("slime.tracking.environment.installed_packages", packages)
    monkeypatch.setenv("BENCH_DOUBLE", str(made.orders))
    return made


def test_both_sides_in_turn_a_failure_and_going_on(bench, capfd):
    bench.order(baseline_1={"steps": 1, "exit": 3})
    assert bench.run() == 1
    assert bench.started() == ["baseline-0", "rl_kernel-0", "baseline-1", "rl_kernel-1"]
    record = bench.record()
    assert [(r.order, r.run, r.finished, len(r.steps)) for r in all_repeats(record)] == [
        (0, "runs/baseline-0", True, 3),
        (1, "runs/rl_kernel-0", True, 3),
        (2, "runs/baseline-1", False, 1),
        (3, "runs/rl_kernel-1", True, 3),
    ]
    what = "baseline-1 ended with exit status 3 after 1 of 3 steps: the last words of a run"
    assert what in record.notes and what in capfd.readouterr().out
    assert record.switch == Switch("rlk_fast", "off", "auto")
    assert (record.tier, record.name, record.claim, record.warm_up) == ("e2e", "runs", "runs", 1)

    for path in bench.out.glob("runs/*/environment.json"):  # as if the command were repeated the next day
        noted = json.loads(path.read_text())
        path.write_text(json.dumps(noted | {"time": noted["time"].replace("20", "19", 1)}))
    before = (bench.out / "runs" / "rl_kernel-1" / "metrics.jsonl").stat()
    bench.order()
    assert bench.run() == 0
    assert bench.started() == ["baseline-1"]
    record = bench.record()
    assert all(repeat.finished for repeat in all_repeats(record))
    as_they_ran = ["runs/baseline-0", "runs/rl_kernel-0", "runs/rl_kernel-1", "runs/baseline-1"]
    assert [repeat.run for repeat in all_repeats(record)] == as_they_ran
    assert [repeat.run for repeat in record.sides[BASELINE]] == ["runs/baseline-0", "runs/baseline-1"]
    assert "runs/unfinished/baseline-1.1 is an attempt that did not finish and was begun anew" in record.notes
    assert (bench.out / "runs" / "unfinished" / "baseline-1.1.log").read_text() == "the last words of a run\n"
    assert (bench.out / "runs" / "rl_kernel-1" / "metrics.jsonl").stat() == before
    out = capfd.readouterr().out
    assert "[1/4] baseline-0: kept, 3 steps" in out and "[3/4] baseline-1: done in" in out

    assert bench.run(repeats=1) == 0 and bench.started() == []
    assert [repeat.run for repeat in all_repeats(bench.record())] == ["runs/baseline-0", "runs/rl_kernel-0"]
    assert "runs/rl_kernel-1 is of a call with more repeats and is left out" in bench.record().notes


SWITCH = "\nswitch: {field: num_steps_per_rollout, baseline: 1, rl_kernel: 2}\nsteps:"
NO_GPUS = pytest.mark.skipif(
    shutil.which("nvidia-smi") is not None, reason="this machine says which GPUs it has"
)


@pytest.mark.parametrize(
    ("changes", "flags", "message"),
    [
        ({}, ["--lrr", "1"], "--lrr is not a known flag; did you mean --lr?"),
        pytest.param(
            {"cpu": "cuda"}, [], "nvidia-smi must say which GPUs are here, got no answer", marks=NO_GPUS
        ),
        (
            {"num-steps-per-rollout: 2, ": "", "\nsteps:": SWITCH},  # a switch that moves a second field
            [],
            "must differ in num_steps_per_rollout alone to be compared, got data.global_batch_size",
        ),
    ],
)
def test_what_cannot_run_or_no_report_would_compare_is_not_begun(bench, changes, flags, message):
    for old, new in changes.items():
        bench.file.write_text(bench.file.read_text().replace(old, new))
    with pytest.raises(ValueError, match=message):
        bench.run(flags=flags)
    assert bench.started() == [] and [path.name for path in bench.out.iterdir()] == [LOCK_FILE]


def test_a_folder_is_of_one_benchmark_at_a_time(bench):
    """The second benchmark would mistake the first one's run for an unfinished run, and move it away while it
    writes."""
    with contextlib.ExitStack() as held:
        lock("--out", bench.out, held)
        with pytest.raises(ValueError, match="--out must not be in use by another run, got .*by process"):
            bench.run()
    assert bench.started() == []


def test_a_whole_run_that_ended_badly_is_no_success_the_second_time_either(bench):
    bench.order(baseline_0={"exit": 3})
    assert bench.run(repeats=1) == 1 and bench.started() == ["baseline-0", "rl_kernel-0"]
    bench.order()
    assert bench.run(repeats=1) == 1 and bench.started() == []
    assert bench.record().notes[0].startswith("baseline-0 ended with exit status 3 after 3 of 3 steps: ")


def test_a_record_has_the_steps_as_they_were_logged_and_what_the_caller_notes(bench):
    assert bench.run(repeats=1, notes=["another run on the next GPU"]) == 0
    record = bench.record()
    assert record.notes[0] == "another run on the next GPU" and record.preset is None and record.experts == 0
    ((baseline,), (fast,)) = record.sides[BASELINE], record.sides[RL_KERNEL]
    assert [step["perf/step_time"] for step in fast.steps] == [1, 2, 3]
    # With two optimizer steps per rollout, the value is their mean, or the largest for *_max. Number 3 had no finite
    # loss.
    assert [step["train/loss"] for step in fast.steps] == [0.125, 0.5, 1.125]
    assert all(step[LOGPROB_DIFF] == 5e-4 and step[LOGPROB_DIFF_MAX] == 1e-2 for step in fast.steps)
    assert all(step["perf/save_model_time"] == 9 for step in fast.steps)
    assert not {"rollout/step", "train/step", "eval/test", "time"} & fast.steps[0].keys()
    assert fast.fallbacks == {"logp": 6} and baseline.fallbacks == {}
    assert "rl_kernel/fast" not in baseline.steps[0] and fast.steps[0]["rl_kernel/fast"] == 0.5
    assert [n for n in record.notes if "train/loss" in n] == [
        "baseline-0: train/loss was nan in step 1",
        "rl_kernel-0: train/loss was nan in step 1",
    ]
    assert fast.config["kernels"]["rlk_fast"] == "auto" and fast.config["data"]["rollout_batch_size"] == 4
    assert "torch" in fast.environment["packages"]
    assert fast.environment["python"]["executable"].startswith("PREFIX/bin/python")
    assert sys.prefix not in json.dumps(fast.environment)

    # A step is complete with its last optimizer step. Percentiles of the steps so far are not a metric of a step.
    path = bench.out / "runs" / "baseline-0" / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    last = max(i for i, line in enumerate(lines) if '"train/step"' in line)
    so_far = '"perf/step_time": 1.0, "perf/step_time_p50": 1.0'
    path.write_text("".join(lines[:last]).replace('"perf/step_time": 1.0', so_far))
    whole = read_steps(path.parent).values
    assert len(whole) == 2 and all("perf/step_time_p50" not in step for step in whole)
    assert len(read_steps(path.parent, trained=False).values) == 3
    assert read_steps(bench.out).values == []


def test_runs_of_other_flags_are_refused_and_stay(bench):
    assert bench.run(repeats=1) == 0
    bench.started()
    for line, what in (
        ({"flags": ["--lr", "0.5"]}, "got lr 1e-06 then and 0.5 now"),
        ({"steps": 5}, "got num_rollout 3 then and 5 now"),
        ({"steps": 2}, "got num_rollout 3 then and 2 now"),
    ):
        with pytest.raises(ValueError, match=f"baseline-0 must have been made with the flags of now, {what}"):
            bench.run(repeats=1, **line)
    assert bench.started() == [] and bench.record().sides[BASELINE][0].finished


def test_a_module_draws_its_rollouts_once(bench):
    bench.order(rollouts={"steps": 1, "exit": 1})
    assert bench.run("module", repeats=1) == 1
    assert bench.started() == ["rollouts"] and not (bench.out / "bench.json").exists()
    bench.order(rl_kernel_0={"exit": 1, "steps": 2})
    assert bench.run("module", repeats=1) == 1
    assert bench.started() == ["rollouts", "baseline-0", "rl_kernel-0"]
    bench.order()
    assert bench.run("module", repeats=1) == 0
    assert bench.started() == ["rl_kernel-0"]
    record = bench.record()
    assert record.tier == "module" and all(repeat.finished for repeat in all_repeats(record))
    assert any("3 saved rollouts" in note for note in record.notes)
    (bench.out / "rollouts" / "1.pt").unlink()
    with pytest.raises(
        ValueError, match="saved rollouts in .* must be those that .*baseline-0 was trained on"
    ):
        bench.run("module", repeats=1)


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_an_interruption_ends_the_run_in_order_and_is_told(bench, number):
    bench.order(baseline_0={"exit": 3}, rl_kernel_0={"steps": 2, "hang": True})
    code = (
        f"import sys; sys.path.insert(0, {str(BENCHMARKS)!r})\n"
        "from switch_bench import planning; from switch_bench.command import main\n"
        f"planning.ENTRY = {planning.ENTRY}; sys.exit(main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", code, "e2e", str(bench.file), "--out", str(bench.out)]
    # If a script starts the tests in the background, they ignore Ctrl-C, and their child processes would too.
    heed = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=heed)
    try:
        hangs, end = bench.out / "runs" / "rl_kernel-0" / "hangs", time.monotonic() + 90
        while not hangs.exists():
            assert process.poll() is None and time.monotonic() < end
            time.sleep(0.05)
        os.kill(process.pid, number)
        out, _ = process.communicate(timeout=30)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 128 + number and "interrupted: what was started has been stopped" in out
    assert bench.orders.with_suffix(".ended").exists()
    record = bench.record()
    assert [len(repeat.steps) for repeat in all_repeats(record)] == [3, 2, 0, 0]
    assert record.notes == [
        "baseline-0 ended with exit status 3 after 3 of 3 steps: the last words of a run",
        "baseline-0: train/loss was nan in step 1",
        "rl_kernel-0 was stopped after 2 of 3 steps",
        "rl_kernel-0: train/loss was nan in step 1",
        "baseline-1 was not started",
        "rl_kernel-1 was not started",
    ]


@pytest.mark.slow
def test_random_weights_and_reduced_depth_are_made_and_told(bench, tmp_path):
    text = bench.file.read_text().splitlines()
    text[2:4] = ["model: {arch: qwen3-moe-tiny, layers: 1}", "data: arithmetic"]
    bench.file.write_text("\n".join(text))
    assert bench.run(repeats=1) == 0
    made = bench.out / "model-qwen3-moe-tiny-1-layers"
    assert json.loads((made / "config.json").read_text())["num_hidden_layers"] == 1
    notes = bench.record().notes
    assert notes[0].startswith("random weights of the shape of qwen3-moe-tiny")
    assert notes[1] == "reduced depth: 1 of the 2 layers, every other dimension is true"
    assert bench.record().experts > 0
    elsewhere = Bench(tmp_path / "b", made)
    elsewhere.orders = bench.orders
    assert elsewhere.run(repeats=1) == 0 and elsewhere.record().notes[:2] == notes[:2]


@pytest.mark.parametrize(
    ("prefix", "told"), [("/usr", "/usr"), ("/usr/local", "/usr/local"), ("/env", "PREFIX")]
)
def test_paths_beside_a_system_python_are_told_whole(tmp_path, prefix, told):
    noted = {"python": {"executable": f"{prefix}/bin/python3"}, "variables": {"CUDA_HOME": "/usr/local/cuda"}}
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "environment.json").write_text(json.dumps(noted))
    run = planning.Planned("run", BASELINE, tmp_path / "run", steps=1, argv=())
    environment = read_repeat(run, 0, tmp_path).environment
    assert environment["python"]["executable"] == f"{told}/bin/python3"
    assert environment["variables"] == noted["variables"]


def test_data_that_changed_since_the_run_that_is_kept_are_refused(bench, model):
    data = bench.out.parent / "own.jsonl"
    data.write_text((model / "arithmetic" / "train.jsonl").read_text())
    bench.order(rl_kernel_0={"steps": 1})
    assert bench.run(data=str(data), repeats=1) == 1
    bench.order()
    with data.open("a") as file:
        file.write(data.read_text().splitlines()[0] + "\n")
    changed = r"files\.\S+own\.jsonl\.sha256: '\w+' in baseline-0, '\w+' in rl_kernel-0"
    with pytest.raises(ValueError, match=changed):
        bench.run(data=str(data), repeats=1)
    assert bench.started() == ["baseline-0", "rl_kernel-0"]
