"""Tests the comparison with TRL and verl: flags, the measured part of the runs, the record, and runs that fail."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from dataclasses import asdict
from pathlib import Path

import make_model
import make_tiny_model
import pytest
import trl_side
import verl_side
from against_peers import main as against_peers
from against_peers import our_result, peer_folder, rollouts_done, run_of, versions_of
from peer_cases import CASES, OURS, TRL, TRL_SLEEP, VERL, VERL_DEFAULT, Place, our_command, peer_job
from peer_table import read_sessions, summary, text, write_sessions
from process_tree import descendants, pss_bytes
from side_process import Ended, error_line

from vime.backends import parse_config


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--cases short,broad", "--cases must be of short, long, wide, smollm2, got broad"),
        (
            "--device cuda --cases short",
            "--cases must be of smollm2-gpu, qwen2.5-0.5b-gpu, qwen3-4b-gpu, qwen3-4b-80gib, got short",
        ),
        ("--cases short --sides ours,their", "--sides must be of ours, trl, trl-sleep, got their"),
        ("--cases short --sides ours,verl", "--sides must be of ours, trl, trl-sleep, got verl"),
        (
            "--device cuda --cases qwen3-4b-gpu --sides ours,their",
            "--sides must be of ours, trl, trl-sleep, verl, verl-default, got their",
        ),
        ("--cases short --rounds 0", "--rounds must be at least 1, got 0"),
        ("--cases short --warm-up 0", "--warm-up must be at least 1, got 0"),
        ("--cases short --warm-up 2 --rollouts 2", "--rollouts must be above --warm-up 2, got 2"),
        ("--cases smollm2", "--data must be GSM8K's train.jsonl for published weights, got None"),
        (
            "--cases short --out nowhere/o.json",
            "--out must name a file in a folder that exists, got nowhere/o.json",
        ),
    ],
)
def test_user_errors_are_one_line_and_exit_code_2(flags, message, capsys):
    assert against_peers(flags.split()) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"against_peers: {message}")


@pytest.mark.parametrize(("name", "steps", "samples"), [("short", 4, 1024), ("wide", 1, 64)])
def test_our_flags_are_valid_and_give_the_steps_of_the_case(name, steps, samples, tmp_path):
    make_tiny_model.main([str(tmp_path)])
    place = Place(tmp_path / "base", tmp_path / "train.jsonl", tmp_path / "run")
    config = parse_config(our_command(CASES[name], place, 3, 1))
    assert config.data.rollout_batch_size * config.data.n_samples_per_prompt == samples
    assert samples // config.data.global_batch_size == steps
    assert config.megatron.params_dtype == "float32"
    assert config.checkpoint.save is None and config.evaluation.eval_interval is None


GPU_CASES = [name for name, case in CASES.items() if case.device == "cuda"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Makes a model without weights and both prompt files."""
    made = tmp_path_factory.mktemp("peers")
    make_model.main(["--arch", "qwen3-4b", "--no-weights", "--arithmetic", str(made / "model")])
    rows = [{"question": f"{i} + 1?", "answer": f"#### {i + 1}"} for i in range(3)]
    (made / "gsm8k.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return made


def place_for(name: str, folder: Path, run_dir: Path) -> Place:
    """Returns a run's files on a card of 140 GiB."""
    files = {"gsm8k": "gsm8k.jsonl", "arithmetic": "model/arithmetic/train.jsonl"}
    return Place(folder / "model", folder / files[CASES[name].data], run_dir, gpu_gib=140.0)


@pytest.mark.parametrize("side", [TRL, TRL_SLEEP])
@pytest.mark.parametrize("name", GPU_CASES)
def test_trl_gets_our_settings_on_a_gpu(name, side, folder, tmp_path):
    case, place = CASES[name], place_for(name, folder, tmp_path)
    config = parse_config(our_command(case, place, 8, 1))
    job = trl_side.Job(**peer_job(case, place, 8, 1, side))
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
    assert theirs["vllm_enable_sleep_mode"] is (side == TRL_SLEEP)
    assert theirs["vllm_max_model_length"] == case.context
    assert job.dataset()["prompt"][0] and config.rollout.rollout_max_response_len == job.max_tokens


@pytest.mark.parametrize("side", [VERL, VERL_DEFAULT])
@pytest.mark.parametrize("name", GPU_CASES)
def test_verl_gets_our_settings(name, side, folder, tmp_path):
    case, place = CASES[name], place_for(name, folder, tmp_path)
    config = parse_config(our_command(case, place, 8, 1))
    job = verl_side.Job(**peer_job(case, place, 8, 1, side))
    theirs = job.settings()
    actor, engine = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
    assert theirs["algorithm.rollout_correction.bypass_mode"] is (side == VERL)
    assert ("trainer.v1.sampler.custom_sampler.name=QuickReplayBuffer" in job.command()) is (side == VERL)
    assert config.data.rollout_batch_size == theirs["data.train_batch_size"] == case.prompts
    assert config.data.n_samples_per_prompt == theirs[f"{engine}.n"] == case.answers
    mini = theirs[f"{actor}.ppo_mini_batch_size"] * case.answers
    assert config.data.global_batch_size == mini == case.samples
    assert config.data.max_tokens_per_gpu == theirs[f"{actor}.ppo_max_token_len_per_gpu"] == case.micro_tokens
    assert (
        config.megatron.lr == theirs[f"{actor}.optim.lr"] and theirs[f"{actor}.optim.betas"] == "[0.9,0.95]"
    )
    assert config.algorithm.eps_clip == theirs[f"{actor}.clip_ratio_low"] == 0.2
    assert config.algorithm.eps_clip_high == theirs[f"{actor}.clip_ratio_high"] == 0.28
    assert theirs[f"{engine}.gpu_memory_utilization"] == round(case.engine_gib / 140, 4)
    assert (
        theirs["data.max_prompt_length"] + case.max_tokens
        == theirs[f"{engine}.max_model_len"]
        == case.context
    )
    assert theirs["actor_rollout_ref.model.enable_gradient_checkpointing"] == case.recompute
    command = job.command()
    assert command[1:3] == ["-m", "verl.trainer.main_ppo"]
    assert "trainer.total_training_steps=8" in command and f"hydra.run.dir={tmp_path}" in command
    assert "reward.custom_reward_function.path=pkg://verl_side" in command
    assert "reward.custom_reward_function.name=score" in command
    assert "+actor_rollout_ref.model.override_config.attn_implementation=torch_varlen" in command


def test_verl_reads_all_prompts_in_order_and_scores_as_we_do(folder, tmp_path):
    case, place = CASES["qwen2.5-0.5b-gpu"], place_for("qwen2.5-0.5b-gpu", folder, tmp_path)
    job = verl_side.Job(**peer_job(case, place, 2, 1, VERL))
    job.write_prompts()
    rows = [json.loads(line) for line in job.prompt_file.read_text().splitlines()]
    assert len(rows) == 64 and [row["extra_info"]["index"] for row in rows] == list(range(64))
    assert rows[4]["prompt"] == [{"role": "user", "content": "1 + 1?"}]
    truth = rows[4]["reward_model"]["ground_truth"]
    assert truth == "#### 2"
    assert verl_side.score("gsm8k", "The answer is 2.", truth, extra_info={"num_turns": 2}) == 1.0
    assert verl_side.score("gsm8k", "The answer is 3.", truth) == 0.0


def write_verl_line(path: Path, step: int, times: dict[str, float]) -> None:
    """Appends a line of verl's file logger, in two parts."""
    data = {f"timing_s/{name}": value for name, value in times.items()}
    data |= {"response_length/mean": 250.0, "critic/score/mean": 0.25, "actor/lr": 1e-6}
    line = json.dumps({"step": step, "data": data}) + "\n"
    with path.open("a") as stream:
        stream.write(line[:20])
        stream.flush()
        stream.write(line[20:])


def test_the_lines_of_verl_are_read_as_they_appear(tmp_path):
    file, writer = tmp_path / "verl.jsonl", "import sys; sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", writer], stdin=subprocess.PIPE) as process:
        assert process.stdin
        lines = verl_side.new_lines(file, process)
        threading.Timer(
            0.1, write_verl_line, [file, 1, {"step": 8.0, "gen": 3.0, "old_log_prob": 0.5}]
        ).start()
        first = next(lines)
        write_verl_line(file, 2, {"step": 4.0, "gen": 1.5})
        process.stdin.close()
        rows = [first, *lines]
    assert [row["step"] for row in rows] == [1, 2]
    result = verl_side.result_of(rows, [20.0, 24.5])
    assert result["begins"] == [12.0, 20.5] and result["generation_s"] == [3.0, 1.5]
    assert result["parts_s"]["timing_s/old_log_prob"] == [0.5, 0.0] and result["reward"] == [0.25, 0.25]
    run = run_of(result, "qwen3-4b-gpu", VERL, 0, 1, Ended(2.0, 30.0, 2**30, 2**31), load=0.1)
    assert run.rollout_s == [8.0, 4.5] and (run.start_s, run.end_s) == (10.0, 5.5)
    shown = text([{"runs": [asdict(run), {**asdict(run), "side": OURS, "rollout_s": [8.0, 3.0]}]}])
    assert "verl / ours" in shown and "1.5 / 1.5 / 1.5" in shown


def test_verl_that_fails_before_its_first_line_gives_no_lines(tmp_path):
    with subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"]) as process:
        assert list(verl_side.new_lines(tmp_path / "verl.jsonl", process)) == []
    assert process.returncode == 3


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


@pytest.mark.parametrize("peer", ["trl", "verl"])
def test_a_folder_that_this_script_did_not_make_is_left_alone(peer, tmp_path):
    (tmp_path / "mine.txt").write_text("keep")
    with pytest.raises(ValueError, match="--peer-envs must be a new folder"):
        peer_folder(tmp_path, peer)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_the_versions_of_peers_are_those_of_their_folders(tmp_path):
    listed = tmp_path / "verl/verl-0.9.1.dist-info"
    listed.mkdir(parents=True)
    (listed / "METADATA").write_text("Metadata-Version: 2.1\nName: verl\nVersion: 0.9.1\n")
    found = versions_of(tmp_path, ["verl", "trl"])
    assert found["peer_versions"] == {"verl": {"verl": "0.9.1"}, "trl": {}} and "torch" in found["versions"]


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
