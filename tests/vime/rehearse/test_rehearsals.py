"""Rehearses a launch of the tiny model whole, and with faults that `vime plan` does not find."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from vime.testing.tiny_model import write_tiny_model

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


@pytest.fixture(scope="module")
def launch(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Flags of a launch for 4 ranks, with the tiny model in place of its model."""
    root = tmp_path_factory.mktemp("launch")
    write_tiny_model(root / "model")
    rows = [{"question": f"{a}+1=", "answer": str(a + 1)} for a in range(32)]
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
