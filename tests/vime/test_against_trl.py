"""The comparison with TRL: the flags of our side, what counts of the runs, the memory of a process tree."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import make_tiny_model
import pytest
from against_trl import CASES, OURS, TRL, main, our_command, our_result, run_of, summary, text, trl_python
from process_tree import descendants, pss_bytes

from vime.backends import parse_config


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--cases short,broad", "--cases must be of short, long, wide, got broad"),
        ("--rounds 0", "--rounds must be at least 1, got 0"),
        ("--rollouts 1", "--rollouts must be at least 2, got 1"),
        ("--out nowhere/o.json", "--out must name a file in a folder that exists, got nowhere/o.json"),
    ],
)
def test_user_errors_are_one_line_and_exit_code_2(flags, message, capsys):
    assert main(flags.split()) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"against_trl: {message}")


@pytest.mark.parametrize(("name", "steps", "samples"), [("short", 4, 1024), ("wide", 1, 64)])
def test_our_flags_are_valid_and_give_the_steps_of_the_case(name, steps, samples, tmp_path):
    make_tiny_model.main([str(tmp_path)])
    config = parse_config(
        our_command(CASES[name], tmp_path / "base", tmp_path / "train.jsonl", 3, 1, tmp_path / "run")
    )
    assert config.data.rollout_batch_size * config.data.n_samples_per_prompt == samples
    assert samples // config.data.global_batch_size == steps
    assert config.megatron.params_dtype == "float32"
    assert config.checkpoint.save is None and config.evaluation.eval_interval is None


def write_metrics(folder: Path) -> None:
    """Rollouts that end 10, 14 and 17 s after 1970, and the other records of a run between them."""
    rows: list[dict[str, float]] = [{"time": 1.0, "eval/addition": 0.5}]
    for end, step in ((10.0, 5.0), (14.0, 3.5), (17.0, 2.5)):
        times = {"perf/step_time": step, "perf/rollout_time": step / 2}
        rows.append({"time": end, "rollout/response_len/mean": 4.0, "rollout/raw_reward": 0.25, **times})
        rows.append({"time": end, "train/loss": 0.0})
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")


def test_rollouts_count_from_end_to_end_and_the_first_does_not(tmp_path):
    write_metrics(tmp_path)
    ours = run_of(our_result(tmp_path), "short", OURS, 0, begin=2.0, end=19.0, peak=2**31, load=0.1)
    assert ours.rollout_s == [5.0, 4.0, 3.0]
    assert (ours.start_s, ours.end_s, ours.wall_s, ours.peak_memory_gib) == (3.0, 2.0, 17.0, 2.0)
    theirs = {
        **{"begins": [1.0, 9.0], "ends": [8.0, 15.0], "generation_s": [2.0, 1.0]},
        **{"response_tokens": [4.0, 4.0], "reward": [0.0, 0.5]},
    }
    runs = [ours, run_of(theirs, "short", TRL, 0, begin=0.0, end=16.0, peak=2**30, load=0.1)]
    rows = summary(runs)["short"]
    assert rows["s per rollout"] == {
        OURS: {"median": 3.5, "lowest": 3.0, "highest": 4.0},
        TRL: {"median": 7.0, "lowest": 7.0, "highest": 7.0},
        "ratio": 2.0,
    }
    assert rows["peak memory, GiB"]["ratio"] == 0.5 and rows["start, s"][TRL]["median"] == 1.0
    assert "ratio" not in rows["reward"] and rows["reward"][TRL]["median"] == 0.5
    assert "3.5 (3 to 4)" in text(summary(runs)) and "2.00" in text(summary(runs))


def test_a_folder_that_this_script_did_not_make_is_left_alone(tmp_path):
    (tmp_path / "mine.txt").write_text("keep")
    with pytest.raises(ValueError, match="--trl-env must be a new folder"):
        trl_python(tmp_path)
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
