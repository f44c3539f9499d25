"""Compares logged numbers, the console lines and environment.json with hand-computed figures."""

from __future__ import annotations

import io
import json
import math
import subprocess
import sys

import numpy as np
import pytest
import torch

from slime.tracking import (
    LOGPROB_DIFF,
    LOGPROB_DIFF_MAX,
    StepLine,
    collect_environment,
    progress,
    write_environment,
)
from slime.tracking.metrics import as_floats


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_as_floats_takes_numbers_only():
    numbers = as_floats({"a": np.float32(0.5), "b": torch.tensor(2), "c": True, "d": 3})
    assert numbers == {"a": 0.5, "b": 2.0, "c": 1.0, "d": 3.0}
    assert all(type(value) is float for value in numbers.values())
    with pytest.raises(ValueError, match="metric a must be one number, got Tensor"):
        as_floats({"a": torch.zeros(2)})
    with pytest.raises(ValueError, match="metric 'a' must be a name with a number, got '1'"):
        as_floats({"a": "1"})


METRICS = {
    "rollout/raw_reward": 0.4125,
    "rollout/response_len/mean": 12.34,
    "train/loss": -0.012,
    "train/ppo_kl": 0.00012,
    LOGPROB_DIFF: 2.5e-7,
    LOGPROB_DIFF_MAX: 1.2e-6,
    "train/grad_norm": 0.5321,
    "rl_kernel/fast": 1.0,
    "perf/tokens_per_gpu_per_sec": 5123.4,
    "perf/rollout_time": 3.21,
    "perf/train_time": 1.08,
    "perf/update_weights_time": 0.25,
}


def test_step_line_is_aligned_plain_text():
    stream = io.StringIO()
    line = StepLine(total=60, stream=stream)
    line.show(0, METRICS)
    line.show(11, METRICS)
    header, first, second = stream.getvalue().splitlines()
    names = "step reward length loss kl_ref kl_old dlogp max grad fast tok/s/gpu roll_s train_s sync_s"
    assert header.split() == names.split()
    values = "0/60 0.412 12.3 -1.2e-02 - 1.2e-04 2.5e-07 1.2e-06 0.532 100% 5,123 3.2 1.1 0.2"
    assert first.split() == values.split()
    assert second.split()[0] == "11/60"
    assert len(header) == len(first) == len(second) <= 120
    assert "\x1b" not in stream.getvalue()


def test_step_line_repeats_its_header_every_20_lines():
    stream = io.StringIO()
    line = StepLine(stream=stream)
    for step in range(41):
        line.show(step, METRICS)
    assert [i for i, text in enumerate(stream.getvalue().splitlines()) if "reward" in text] == [0, 21, 42]


def test_step_line_on_a_terminal_colours_the_change_and_broken_values():
    stream = Terminal()
    line = StepLine(stream=stream)
    line.show(0, METRICS)
    line.show(1, METRICS | {"rollout/raw_reward": 0.5, "train/loss": math.nan})
    line.show(2, METRICS | {"rollout/raw_reward": 0.1})
    _, _, up, down = stream.getvalue().splitlines()
    assert "\x1b[32m 0.500\x1b[0m" in up and "\x1b[31m 0.100\x1b[0m" in down
    assert "\x1b[1;37;41m     nan\x1b[0m" in up


def test_eval_line_names_every_score():
    stream = io.StringIO()
    StepLine(stream=stream).show_eval(20, {"eval/gsm8k": 0.43125, "eval/gsm8k-truncated_ratio": 0.0})
    assert stream.getvalue() == "eval at step 20:  gsm8k 0.4313  gsm8k-truncated_ratio 0\n"


def test_progress_shows_on_a_terminal_only():
    silent, shown = io.StringIO(), Terminal()
    for stream in (silent, shown):
        with progress("rollout 4", "group", stream) as bar:
            bar.n, bar.total = 8, 8
            bar.refresh()
    assert silent.getvalue() == ""
    assert "rollout 4: 100%" in shown.getvalue() and "8/8" in shown.getvalue()


def test_environment_file_has_facts_and_no_secret(tmp_path):
    environ = {
        "VIME_RUN_KEY": "run-key-0123456789",
        "WANDB_API_KEY": "wandb-0123456789",
        "HOME": "not of interest",
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "NCCL_DEBUG": "copy of wandb-0123456789",
        "CUDA_VISIBLE_DEVICES": "0,1",
    }
    path = write_environment(tmp_path, ["vime", "train", "--note", "run-key-0123456789"], environ)
    text = path.read_text()
    facts = json.loads(text)
    assert "0123456789" not in text
    assert facts["command"] == ["vime", "train", "--note", "***"]
    assert facts["variables"] == {
        "CUDA_VISIBLE_DEVICES": "0,1",
        "NCCL_DEBUG": "copy of ***",
        "VIME_RUN_KEY": "***",
        "VLLM_CPU_KVCACHE_SPACE": "2",
    }
    assert facts["packages"]["numpy"] == np.__version__
    assert facts["python"]["version"] == ".".join(map(str, sys.version_info[:3]))
    assert facts["cpu"]["cores"] >= facts["cpu"]["usable_cores"] >= 1
    data = tmp_path / "data.jsonl"
    data.write_bytes(b"abc")
    write_environment(tmp_path, ["vime", "train"], environ, [data, tmp_path / "none"])
    abc = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"  # FIPS 180-2, appendix B.1
    assert json.loads(path.read_text())["files"] == {str(data): {"bytes": 3, "sha256": abc}}
    assert json.loads((tmp_path / "environment.1.json").read_text()) == facts
    assert json.loads(path.read_text())["command"] == ["vime", "train"]


def test_what_packages_carry_along_is_not_of_the_environment():
    """Setuptools and Ray add their own folders to the path once they are imported."""
    code = "from slime.tracking import collect_environment; print(collect_environment([], {})['packages'])"
    imports = ("", "import setuptools; ", "import ray; ")
    found = [subprocess.check_output([sys.executable, "-c", before + code], text=True) for before in imports]
    assert found[0] == found[1] == found[2] and "'numpy'" in found[0]


def test_environment_names_the_commit_only_of_its_own_checkout(tmp_path):
    from rl_kernel.host import git_state

    def git(*words: str) -> str:
        command = ["git", "-C", str(tmp_path), "-c", "user.name=t", "-c", "user.email=t@t", *words]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    git("init", "-q")
    assert git_state(tmp_path.resolve()) is None  # there is no commit yet
    (tmp_path / "inner").mkdir()
    (tmp_path / "file").write_text("1")
    git("add", "file")
    git("commit", "-qm", "one")
    commit = git("rev-parse", "HEAD")
    assert git_state(tmp_path.resolve()) == {"commit": commit, "modified": False}
    (tmp_path / "file").write_text("2")
    changed = git_state(tmp_path.resolve())
    assert changed == {"commit": commit, "modified": True, "difference": changed["difference"]}
    (tmp_path / "file").write_text("3")
    assert (
        git_state(tmp_path.resolve())["difference"] != changed["difference"]
    )  # other code of the same commit
    assert git_state((tmp_path / "inner").resolve()) is None
    assert collect_environment([], {})["variables"] == {}
