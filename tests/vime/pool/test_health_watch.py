"""A stopped engine is named, with its process and the run's next action; tests/e2e/fault_cases.py has a real engine."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from engine_double import DoubleServer

from vime.pool import health_watch
from vime.pool.member import Member
from vime.vllm.control import VllmControl
from vime.vllm.server import VllmSpec


def wait_for(condition: Callable[[], bool], timeout_s: float = 20) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "the condition never came"
        time.sleep(0.05)


def test_a_stopped_engine_is_named_while_the_run_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name, seconds in {"SAY_AFTER_S": 1.0, "_LOOK_EVERY_S": 0.2, "_ANSWER_S": 0.5}.items():
        monkeypatch.setattr(health_watch, name, seconds)
    caplog.set_level(logging.WARNING)
    spec = VllmSpec(model_path="", run_key="k", log_path=str(tmp_path / "log"), weight_dir=str(tmp_path))
    member, stopping = Member(spec, 0, "keep", VllmControl), threading.Event()
    member.launch(DoubleServer)
    try:
        handle = member.handle
        assert isinstance(handle, DoubleServer) and handle._process is not None
        handle.wait_ready()
        member.serving = True
        health_watch.HealthWatch([member], stopping, 60, lambda *load: None).start()
        (server,) = psutil.Process(handle._process.pid).children()
        server.suspend()
        wait_for(lambda: "the run waits" in caplog.text)
        host = os.uname().nodename
        assert f"engine engine-0-1 at {member.control.url} has not answered for" in caplog.text
        assert (
            f"process {server.pid} on {host}, where a signal (SIGSTOP) has stopped {server.pid}"
            in caplog.text
        )
        assert "replaced after about 60 s" in caplog.text
        server.resume()
        wait_for(lambda: "works again after" in caplog.text)
        assert caplog.text.count("the run waits") == 1
    finally:
        stopping.set()
        member.stop()
