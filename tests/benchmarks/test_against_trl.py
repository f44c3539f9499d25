"""Tests the comparison with TRL: its flags, the measured part of the runs, the record, and runs that fail."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import make_model
import make_tiny_model
import pytest
from against_trl import main as against_trl
from against_trl import our_result, rollouts_done, run_of, trl_folder
from process_tree import descendants, pss_bytes
from side_process import Ended, error_line
from trl_cases import CASES, OURS, TRL, TRL_SLEEP, Place, our_command, trl_job
from trl_side import Job
from trl_table import read_sessions, summary, text, write_sessions

from vime.backends import parse_config


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--cases short,broad", "--cases must be of short, long, wide, smollm2, got broad"),
        (
            "--device cuda --cases short",
            "--cases must be of smollm2-gpu, qwen3-4b-gpu, qwen3-4b-80gib, got short",
        ),
        ("--cases short --sides ours,their", "--sides must be of ours, trl, trl-sleep, got their"),
        ("--cases short --rounds 0", "--rounds must be at least 1, got 0"),
        ("--cases short --warm-up 0", "--warm-up must be at least 1, got 0"),
        ("--cases short --warm-up 2 --rollouts 2", "--rollouts must be above --warm-up 2, got 2"),
        ("--cases smollm2", "--data must be GSM8K's train.jsonl for SmolLM2, got None"),
        (
            "--cases short --out nowhere/o.json",
            "--out must name a file in a folder that exists, got nowhere/o.json",
        ),
    ],
)
def test_user_errors_are_one_line_and_exit_code_2(flags, message, capsys):
    assert against_trl(flags.split()) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"against_trl: {message}")


@pytest.mark.parametrize(("name", "steps", "samples"), [("short", 4, 1024), ("wide", 1, 64)])
def test_our_flags_are_valid_and_give_the_steps_of_the_case(name, steps, samples, tmp_path):
    make_tiny_model.main([str(tmp_path)])
    place = Place(tmp_path / "base", tmp_path / "train.jsonl", tmp_path / "run")
    config = parse_config(our_command(CASES[name], place, 3, 1))
    assert config.data.rollout_batch_size * config.data.n_samples_per_prompt == samples
    assert samples // config.data.global_batch_size == steps
    assert config.megatron.params_dtype == "float32"
    assert config.checkpoint.save is None and config.evaluation.eval_interval is None


@pytest.mark.parametrize("sleep", [False, True])
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.device == "cuda"])
def test_both_sides_of_a_gpu_case_get_the_same_settings(name, sleep, tmp_path):
    make_model.main(["--arch", "qwen3-4b", "--no-weights", "--arithmetic", str(tmp_path / "model")])
    case = CASES[name]
    prompts = tmp_path / "model/arithmetic/train.jsonl"
    if case.data == "gsm8k":
        prompts = tmp_path / "gsm8k.jsonl"
        prompts.write_text(json.dumps({"question": "1 + 1?", "answer": "#### 2"}) + "\n")
    place = Place(tmp_path / "model", prompts, tmp_path / "run", gpu_gib=140.0)
    config = parse_config(our_command(case, place, 8, 1))
    job = Job(**trl_job(case, place, 8, 1, sleep))
    theirs = job.settings()
    assert (config.megatron.params_dtype, theirs["bf16"]) == ("bfloat16", True)
    assert config.algorithm.eps_clip_high == theirs["epsilon_high"] == 0.28
    assert config.megatron.lr == theirs["learning_rate"] and config.megatron.adam_beta2 == 0.95
    # One optimizer step has all samples of the rollout, and one rollout feeds one optimizer step.
    micro, parts = theirs["per_device_train_batch_size"], theirs["gradient_accumulation_steps"]
    assert config.data.global_batch_size == micro * parts == case.samples
    assert theirs["steps_per_generation"] == parts and theirs["max_steps"] == config.data.num_rollout == 8
    assert theirs["gradient_checkpointing"] == case.recompute
    flags = our_command(case, place, 8, 1)
    assert ("--recompute-granularity" in flags) == case.recompute
    share = flags[flags.index("--vllm-gpu-memory-utilization") + 1]
    assert float(share) == theirs["vllm_gpu_memory_utilization"] == round(case.engine_gib / 140, 4)
    assert theirs["vllm_enable_sleep_mode"] is sleep and theirs["vllm_max_model_length"] == case.context
    assert job.dataset()["prompt"][0] and config.rollout.rollout_max_response_len == job.max_tokens


def write_metrics(folder: Path) -> None:
    """Writes rollouts that end 10, 14 and 17 s after 1970, and the other records of a run between them."""
    rows: list[dict[str, float]] = [{"time": 1.0, "eval/addition": 0.5}]
    for end, step in ((10.0, 5.0), (14.0, 3.5), (17.0, 2.5)):
        times = {"perf/step_time": step, "perf/rollout_time": step / 2}
        rows.append({"time": end, "rollout/response_len/mean": 4.0, "rollout/raw_reward": 0.25, **times})
        rows.append({"time": end, "train/loss": 0.0})
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")


THEIRS = {
    **{"begins": [1.0, 9.0], "ends": [8.0, 15.0], "generation_s": [2.0, 1.0]},
    **{"response_tokens": [4.0, 4.0], "reward": [0.0, 0.5]},
}


def test_rollouts_count_from_end_to_end_and_the_first_does_not(tmp_path):
    write_metrics(tmp_path)
    assert rollouts_done(tmp_path, OURS) == 3 and rollouts_done(tmp_path, TRL) == 0
    ours = run_of(our_result(tmp_path), "short", OURS, 0, 1, Ended(2.0, 19.0, 2**31, None), load=0.1)
    assert ours.rollout_s == [5.0, 4.0, 3.0]
    assert (ours.start_s, ours.end_s, ours.wall_s, ours.peak_memory_gib) == (3.0, 2.0, 17.0, 2.0)
    trl = run_of(THEIRS, "short", TRL, 0, 1, Ended(0.0, 16.0, 2**30, None), load=0.1)
    rows = summary([{"runs": [asdict(ours), asdict(trl)]}])["short"]
    assert rows["s per rollout"][OURS]["of"] == {"lowest": 3.5, "median": 3.5, "highest": 3.5}
    assert rows["s per rollout"][TRL]["ratio"]["median"] == 2.0
    assert rows["peak memory, GiB"][TRL]["ratio"]["median"] == 0.5
    assert "peak GPU memory, GiB" not in rows
    assert "ratio" not in rows["reward"][TRL] and rows["reward"][TRL]["of"]["median"] == 0.5


def test_a_record_grows_and_its_table_has_the_spread_over_sessions(tmp_path):
    path, sessions = tmp_path / "record.json", []
    for slower in (1.0, 2.0, 4.0):
        runs = []
        for side, times in ((OURS, 1.0), (TRL_SLEEP, 3.0)):
            ends = [8.0, 8.0 + times * (slower if side == TRL_SLEEP else 1.0)]
            gpu = Ended(0.0, 20.0, 2**30, 3 * 2**30)
            runs.append(asdict(run_of({**THEIRS, "ends": ends}, "qwen3-4b-gpu", side, 0, 1, gpu, 0.1)))
        sessions = [*(read_sessions(path) if path.exists() else []), {"runs": runs}]
        write_sessions(path, sessions)
    cell = summary(read_sessions(path))["qwen3-4b-gpu"]["s per rollout"][TRL_SLEEP]
    assert cell["ratio"] == {"lowest": 3.0, "median": 6.0, "highest": 12.0}
    shown = text(sessions)
    assert "qwen3-4b-gpu: 6 runs in 3 sessions" in shown and "3 / 6 / 12" in shown
    path.write_text("[]")
    with pytest.raises(ValueError, match="--out must be a record of this script or a new file"):
        read_sessions(path)


def test_the_published_record_has_the_spread_that_its_page_names():
    record = read_sessions(Path("benchmarks/results/against_trl_cpu.json"))
    page = Path("benchmarks/reports/against_trl_cpu.md").read_text()
    assert text(record) in page


APART = """
import os, sys
from pathlib import Path
import process_tree, side_process
process_tree.adopt_orphans()
side_process.END_S = 2.0
how = {"progress": lambda s: print("progress", int(s)), "limit_s": float(sys.argv[2]), "gpu": False}
try:
    side_process.execute([sys.executable, "-u", "-c", sys.argv[1]], Path("log"), os.environ, Path("."), **how)
except RuntimeError as error:
    print(error)
"""


def run_apart(code: str, folder: Path, limit_s: float) -> str:
    """Returns the output of a child process that runs `code`. `execute` ends all processes below the process that
    calls it."""
    paths = os.pathsep.join([str(Path("benchmarks").resolve()), str(Path.cwd())])
    done = subprocess.run(
        [sys.executable, "-c", APART, code, str(limit_s)],
        **{"cwd": folder, "env": {**os.environ, "PYTHONPATH": paths}},
        **{"check": True, "capture_output": True, "text": True, "timeout": 200},
    )
    return done.stdout


def test_a_run_that_fails_ends_with_its_own_error_line(tmp_path):
    said = run_apart("print('a line'); raise ValueError('the flag is wrong')", tmp_path, 100)
    assert said.startswith("progress 0\n")
    assert "a run must exit with 0, got 1: ValueError: the flag is wrong; read log" in said
    assert run_apart("print('fine')", tmp_path, 100) == "progress 0\n"
    (tmp_path / "log").write_text("torch.OutOfMemoryError: CUDA out of memory: 2 GiB\n[W] last words\n")
    assert error_line(tmp_path / "log") == "torch.OutOfMemoryError: CUDA out of memory: 2 GiB"
    (tmp_path / "log").write_text("some words\n\n")
    assert error_line(tmp_path / "log") == "some words"


def test_a_run_that_hangs_is_ended_with_what_it_started(tmp_path):
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    code = f"import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', {deaf!r}]); print(p.pid); p.wait()"
    assert "a run must end within 4 s, got none" in run_apart(code, tmp_path, 4)
    child = int((tmp_path / "log").read_text().split()[0])
    assert not Path(f"/proc/{child}").exists()


def test_a_folder_that_this_script_did_not_make_is_left_alone(tmp_path):
    (tmp_path / "mine.txt").write_text("keep")
    with pytest.raises(ValueError, match="--trl-env must be a new folder"):
        trl_folder(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_memory_counts_processes_below_processes():
    inner = "held = bytearray(b'x') * (64 << 20); print('held', flush=True); input()"
    outer = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {inner!r}])"
    command = [sys.executable, "-c", outer]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout and process.stdout.readline() == "held\n"
        below = descendants(process.pid)
        assert len(below) == 1 and process.pid in descendants(os.getpid())
        assert 64 << 20 < pss_bytes(below[0]) < 128 << 20
        process.communicate("\n")
    assert pss_bytes(below[0]) == 0
