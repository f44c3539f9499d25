"""Tests a call in a forked process: its result, its errors, and the state that stays out of this process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest

from vime.start.fork_call import OverLimit, run_in_fork


def children() -> set[int]:
    return {child.pid for child in psutil.Process().children()}


def test_the_result_comes_back_and_what_was_imported_does_not():
    def call() -> list[str]:
        import xmlrpc.server

        return [xmlrpc.server.__name__, str(os.getpid())]

    assert "xmlrpc.server" not in sys.modules
    name, process = run_in_fork(call, "a call")
    assert name == "xmlrpc.server" and name not in sys.modules and int(process) != os.getpid()


def test_a_value_error_is_the_same_and_another_error_has_its_traceback():
    def refuse() -> None:
        raise ValueError("--x must be 1, got 2; set it")

    def fail() -> None:
        raise OSError("no such disk")

    with pytest.raises(ValueError, match=r"^--x must be 1, got 2; set it$"):
        run_in_fork(refuse, "a call")
    with pytest.raises(
        RuntimeError,
        match=r"(?s)^a call must end .*\nTraceback.*in fail\n.*OSError: no such disk",
    ):
        run_in_fork(fail, "a call")


def test_a_killed_process_is_an_error():
    with pytest.raises(RuntimeError, match=r"^a call must end with a result, got exit code -9 .*more memory"):
        run_in_fork(lambda: os.kill(os.getpid(), signal.SIGKILL), "a call")


def test_an_interrupt_ends_the_process():
    before = children()
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    began = time.monotonic()
    try:
        with pytest.raises(KeyboardInterrupt):
            run_in_fork(lambda: time.sleep(30), "a call")
    finally:
        timer.join()
        signal.signal(signal.SIGINT, handler)
    assert time.monotonic() - began < 10 and children() == before


def test_a_call_over_its_limit_ends_with_all_that_it_started(tmp_path):
    def stuck() -> None:
        (tmp_path / "child").write_text(str(subprocess.Popen(["sleep", "60"]).pid))
        time.sleep(60)

    began = time.monotonic()
    with pytest.raises(OverLimit, match="no end within 1 s"):
        run_in_fork(stuck, "a call", limit_s=1.0)
    assert time.monotonic() - began < 20
    child = int((tmp_path / "child").read_text())
    while psutil.pid_exists(child) and psutil.Process(child).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() - began < 20
        time.sleep(0.05)
    assert run_in_fork(lambda: 7, "a call", limit_s=30.0) == 7
