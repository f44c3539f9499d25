"""Tests that a command that writes files ends its work although the reader of its output has gone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from vime.commands import COMMANDS, WORK

PRINTS = "plan config doctor checkpoint watch compare models flags explain completion"


def test_each_command_prints_or_works() -> None:
    assert COMMANDS.keys() == WORK | set(PRINTS.split())


@pytest.mark.parametrize(
    "words", [["new", "reward", "mine"], ["import", "trl", "run.py", "--output", "mine.yaml"]]
)
def test_files_are_written_without_a_reader(words: list[str], tmp_path: Path) -> None:
    (tmp_path / "run.py").write_text(
        "from trl import GRPOConfig, GRPOTrainer\n\n\n"
        "def reward(completions, **kwargs):\n    return [1.0 for _ in completions]\n\n\n"
        "config = GRPOConfig(output_dir='out', learning_rate=1e-6)\n"
        "trainer = GRPOTrainer(model='m', reward_funcs=[reward], args=config, train_dataset=None)\n"
    )
    command = [sys.executable, "-m", "vime", *words]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.close()
    _, error = process.communicate(timeout=60)
    assert list(tmp_path.glob("mine*")), error
    assert process.returncode == 0 and b"the command continues without it" in error
