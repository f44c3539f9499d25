"""A directory that a run uses is an error for a second run, also as --save, until the first run has died."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from vime import driver
from vime.run.lock import HELD_FILE, lock_all, require_free

HOLDER = """
import fcntl, os, sys, time
from contextlib import ExitStack
def missing(*arguments): raise OSError(int(sys.argv[3]), "no flock here")
if int(sys.argv[3]): fcntl.flock = missing
from vime.run.lock import lock_all
with ExitStack() as stack:
    lock_all({"--run-dir": sys.argv[1], "--save": sys.argv[2]}, stack)
    print("held", flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("missing", [0, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK])
def test_a_used_directory_is_refused_until_its_run_has_died(
    tmp_path: Path, missing: int, monkeypatch
) -> None:
    """A file system without flock, which a test cannot make, does the same: the lock of a dead run is taken over."""
    run_dir, save = tmp_path / "run", tmp_path / "save"
    if missing:
        no_flock(monkeypatch, missing)
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(run_dir), str(save), str(missing)],
        stdout=subprocess.PIPE,
        text=True,
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


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a file system that refuses files to root")
def test_a_plan_finds_a_folder_in_which_the_kernel_refuses_files():
    with pytest.raises(
        ValueError, match="--save must be a directory that this user can write to and lock, got"
    ):
        require_free("--save", "/proc/vime/checkpoint")


def no_flock(monkeypatch, code: int = errno.ENOSYS) -> None:
    def flock(*arguments):
        raise OSError(code, "no flock here")

    monkeypatch.setattr(fcntl, "flock", flock)
    monkeypatch.setattr("vime.run.lock._LOOK_S", 0.3)


def test_without_flock_a_run_of_another_host_is_named_with_what_to_do(tmp_path: Path, monkeypatch, capsys):
    no_flock(monkeypatch)
    held = tmp_path / HELD_FILE
    held.write_text("77\nnode-3\n", encoding="utf-8")
    with ExitStack() as stack, pytest.raises(ValueError, match="in use by process 77 on node-3; ") as refused:
        lock_all({"--save": str(tmp_path)}, stack)
    assert f"end that run, remove {held} if it has ended already, or name another" in str(refused.value)
    held.unlink()
    with ExitStack() as stack:
        lock_all({"--save": str(tmp_path)}, stack)
        assert held.read_text(encoding="utf-8").startswith(f"{os.getpid()}\n{os.uname().nodename}")
        assert f"the lock of --save is the file {held}" in capsys.readouterr().err
    assert not held.exists()


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
    told = driver._describe_error(RuntimeError("the cause"), tmp_path / "file" / "logs")
    assert "vime train: the cause" in told and "cannot be written: Not a directory" in told
