"""The training benchmark reports a wrong option in one line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from training_speed import main

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("", "--hf-checkpoint must be given (a Hugging Face checkpoint directory), got none"),
        ("--hf-checkpoint nowhere", "--hf-checkpoint must be a directory with a config.json, got nowhere"),
        ("--steps 2", "--steps must be more than the 2 that compile kernels, got 2"),
        ("--sequences 12", "--sequences must be a multiple of --group 8, got 12"),
        ("--group 1", "--group must be at least 2, got 1"),
        ("--out nowhere/o.json", "--out must name a file in a folder that exists, got nowhere/o.json"),
    ],
)
def test_user_errors_are_one_line_and_exit_code_2(flags, message, capsys):
    assert main(["--device", "cpu", *flags.split()]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"training_speed: {message}")


def test_the_command_itself_ends_with_that_line_and_code():
    """The command prints nothing else. Messages from imports would come before the line."""
    command = [
        sys.executable,
        str(ROOT / "benchmarks" / "training_speed.py"),
        "--device",
        "cpu",
        "--lrr",
        "1",
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    number, first, second = done.stderr.splitlines()
    assert done.returncode == 2 and number == "training_speed: 2 problems:"
    assert (
        first == "  1. --lrr is not a known flag; did you mean --lr?"
        and "--hf-checkpoint must be given" in second
    )
