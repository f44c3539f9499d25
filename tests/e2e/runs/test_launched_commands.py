"""Tests that the end of a command of a test ends the processes of that command only."""

from __future__ import annotations

import sys
from pathlib import Path

import psutil
from train_fixtures import launched

STARTS_LATER = """
import os, subprocess, sys, time
print("ready", flush=True)

while not os.path.exists(sys.argv[1]):
    time.sleep(0.02)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
print("child", child.pid, flush=True)
time.sleep(60)
"""


def test_a_command_ends_without_the_later_processes_of_another_command(tmp_path: Path) -> None:
    start = tmp_path / "start"
    command = [sys.executable, "-c", STARTS_LATER, str(start)]
    with launched(command, tmp_path / "first.out") as first:
        first.wait_for(lambda: "ready" in first.output, "the first command", 30)
        sleeper = [sys.executable, "-c", "import time; time.sleep(60)"]
        with launched(sleeper, tmp_path / "second.out") as second:
            start.touch()
            first.wait_for(lambda: "child" in first.output, "its child", 30)
            assert list(second.left()) == [second.process.pid]
        child = int(first.output.split()[-1])
        assert second.process.poll() is not None and psutil.pid_exists(child)
    assert not psutil.pid_exists(child)
