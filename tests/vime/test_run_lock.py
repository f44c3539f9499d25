"""A second run is refused a directory that a run uses, also through --save, and gets it once that run has died."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from vime import train
from vime.run_lock import lock_all

HOLDER = """
import sys, time
from contextlib import ExitStack
from vime.run_lock import lock_all
with ExitStack() as stack:
    lock_all({"--run-dir": sys.argv[1], "--save": sys.argv[2]}, stack)
    print("held", flush=True)
    time.sleep(600)
"""


def test_a_used_directory_is_refused_until_its_run_has_died(tmp_path: Path) -> None:
    run_dir, save = tmp_path / "run", tmp_path / "save"
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(run_dir), str(save)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        for flag, directory in (("--run-dir", run_dir), ("--save", save)):
            with (
                ExitStack() as stack,
                pytest.raises(ValueError, match=f"{flag} must not be in use") as refused,
            ):
                lock_all({flag: str(directory)}, stack)
            assert f"process {holder.pid} on {os.uname().nodename}" in str(refused.value)
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.wait()
    with ExitStack() as stack:
        lock_all({"--run-dir": str(run_dir), "--save": str(save)}, stack)


def test_one_directory_for_both_flags(tmp_path: Path) -> None:
    with ExitStack() as stack:
        lock_all({"--run-dir": str(tmp_path), "--save": f"{tmp_path}/", "--load": None}, stack)


def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with (
        ExitStack() as stack,
        pytest.raises(ValueError, match="--run-dir must be a directory .* Not a directory"),
    ):
        lock_all({"--run-dir": str(tmp_path / "file" / "run")}, stack)


def test_an_error_is_told_where_logs_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    told = train._told(RuntimeError("the cause"), tmp_path / "file" / "logs")
    assert "vime train: the cause" in told and "cannot be written: Not a directory" in told
