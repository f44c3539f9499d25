"""Rehearses a launch of the tiny model whole, and with faults that `vime plan` does not find."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from vime.testing.tiny_model import BYTES, write_tiny_model

HOOKS = "rehearsal_faults"
ROOT = Path(__file__).parents[3]
RIGHT = ["--custom-rm-path", f"{HOOKS}.score"]
FAULTS = {
    "reward-raises": (["--custom-rm-path", f"{HOOKS}.raise_later"], "no such answer"),
    "reward-of-text": (["--custom-rm-path", f"{HOOKS}.give_text_later"], "right"),
    "reward-of-nan": (["--custom-rm-path", f"{HOOKS}.give_nan_later"], "finite"),
    "filter-drops-all": (
        [*RIGHT, "--dynamic-sampling-filter-path", f"{HOOKS}.drop_all"],
        "must keep some groups",
    ),
    "filter-raises": ([*RIGHT, "--dynamic-sampling-filter-path", f"{HOOKS}.raise_in_filter"], "difficulty"),
    "mask-too-long": ([*RIGHT, "--custom-generate-function-path", f"{HOOKS}.mask_too_long"], "loss_mask"),
    "mask-empty": ([*RIGHT, "--custom-generate-function-path", f"{HOOKS}.mask_nothing"], "mask"),
    "log-probs-shifted": (
        [*RIGHT, "--custom-generate-function-path", f"{HOOKS}.shift_log_probs"],
        "log-probs",
    ),
    "rewards-lost": ([*RIGHT, "--custom-reward-post-process-path", f"{HOOKS}.spread_badly"], "reward"),
    "logging-raises": (
        [*RIGHT, "--custom-rollout-log-function-path", f"{HOOKS}.log_rollout"],
        "no_such_flag",
    ),
    "sample-hook-raises": ([*RIGHT, "--rollout-sample-hook-path", f"{HOOKS}.hook_sample"], "no connection"),
}
"""Name -> flags with a fault, and a word of the problem."""
NAMED = {
    "label key": (["--label-key", "kind"], "label: --label-key kind is not the column of the answers"),
    "stop token": (
        ["--rollout-stop", "<|eot_id|>"],
        "stop: --rollout-stop <|eot_id|> is no token of the model",
    ),
    "stop token id": (["--rollout-stop-token-ids", "151645"], "[151645] in stop_token_ids"),
    "end of turn": ([], "the chat template ends an answer with <|im_end|>"),
    "tool parser": (["--vllm-tool-call-parser", "hermes2"], "parser: --vllm-tool-call-parser"),
    "read-only folder": (
        ["--save", "checkpoints", "--save-hf", "/proc/hf/{rollout_id}"],
        "folders: --save-hf is in a folder in which this user cannot write",
    ),
}
"""Name -> flags with a wrong name, and a part of the problem. One rehearsal has all.
The fault of the end of a turn is in the model's files."""


@pytest.fixture(scope="module")
def launch(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Flags of a launch for 4 ranks, with the tiny model in place of its model."""
    root = tmp_path_factory.mktemp("launch")
    write_tiny_model(root / "model")
    rows = [{"question": f"{a}+1=", "answer": str(a + 1), "kind": "sum"} for a in range(32)]
    (root / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [
        *("--hf-checkpoint", str(root / "model"), "--prompt-data", str(root / "rows.jsonl"), "--colocate"),
        *("--input-key", "question", "--label-key", "answer", "--apply-chat-template"),
        *("--num-rollout", "200", "--rollout-batch-size", "32", "--n-samples-per-prompt", "8"),
        *("--global-batch-size", "256", "--rollout-max-response-len", "16", "--lr", "1e-4"),
        *(
            "--device",
            "cpu",
            "--actor-num-gpus-per-node",
            "4",
            "--use-dynamic-batch-size",
            "--max-tokens-per-gpu",
            "8192",
        ),
    ]


def call(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(ROOT), str(Path(__file__).parent)])
    words = [sys.executable, "-P", "-m", "vime", *command]
    return subprocess.run(
        words, cwd=folder, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=400
    )


@pytest.mark.slow
def test_a_launch_is_rehearsed(launch: list[str], tmp_path: Path) -> None:
    done = call(["rehearse", "--processes", "1", "--out", str(tmp_path / "out"), *launch, *RIGHT], tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    page = (tmp_path / "out" / "page.txt").read_text()
    assert "resumed from the checkpoint and trained the last rollout" in page
    assert "12 trained in 3 rollouts" in page and "2 starts" in page
    for change in (
        "--actor-num-gpus-per-node 4 -> 1",
        "--num-rollout 200 -> 3",
        "--rollout-batch-size 32 -> 4",
    ):
        assert change in " ".join(page.split())
    assert page.startswith("rehearsal of the flags: 0 problems")
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found(name: str, launch: list[str], tmp_path: Path) -> None:
    flags, word = FAULTS[name]
    planned = call(["plan", *launch, *flags], tmp_path)
    assert planned.returncode == 0, planned.stderr
    done = call(["rehearse", "--processes", "1", "--out", str(tmp_path / "out"), *launch, *flags], tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    wrong = re.search(r"^Would fail\n((?:  .*\n)*)", done.stdout, re.M)
    assert wrong is not None and word in wrong[1], done.stdout


@pytest.mark.slow
def test_faults_of_names_are_found_together(launch: list[str], tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(launch[1], model)
    for file, key, value in (
        ("tokenizer_config.json", "eos_token", "<|endoftext|>"),
        ("config.json", "eos_token_id", BYTES),
        ("generation_config.json", "eos_token_id", BYTES),
    ):
        read = json.loads((model / file).read_text())
        (model / file).write_text(json.dumps({**read, key: value}))
    flags = [word for given, _ in NAMED.values() for word in given]
    whole = [*launch, *flags, "--rm-type", "math", "--hf-checkpoint", str(model)]
    planned = call(["plan", *whole], tmp_path)
    assert planned.returncode == 0, planned.stderr
    done = call(["rehearse", "--processes", "1", "--out", str(tmp_path / "out"), *whole], tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    wrong = re.search(r"^Would fail\n((?:  .*\n)*)", done.stdout, re.M)
    assert wrong is not None
    found = " ".join(wrong[1].split())
    assert [name for name, (_, text) in NAMED.items() if text not in found] == [], done.stdout
    assert "6 problems" in done.stdout
