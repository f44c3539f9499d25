"""Sleeping on a GPU that others use. Its start gate: tests/e2e/engines/test_engine_start.py, with a real server."""

from __future__ import annotations

import ast
import inspect
import textwrap
import threading

import pytest
from vllm.config import VllmConfig
from vllm.v1.worker.gpu_worker import Worker
from vllm.v1.worker.worker_base import WorkerWrapperBase

from vime.vllm.worker.shared_gpu import LESS_IS_FREE, beside_others, install


def test_vllm_says_so_at_the_end_of_sleep():
    """What is let through is the last thing that the installed vLLM's worker does, but for its log line."""
    (sleep,) = ast.parse(textwrap.dedent(inspect.getsource(Worker.sleep))).body
    assert isinstance(sleep, ast.FunctionDef)
    *_, check, log = sleep.body
    assert isinstance(check, ast.Assert) and isinstance(check.msg, ast.Constant)
    assert check.msg.value == LESS_IS_FREE
    assert ast.unparse(log).startswith("logger.info(")


def test_memory_that_others_take_is_no_error(capsys):
    asked = []

    def sleep(level: int) -> None:
        asked.append(level)
        if level == 2:
            raise AssertionError(LESS_IS_FREE)

    beside_others(sleep)(1)
    assert "others on its GPU" not in capsys.readouterr().out
    beside_others(sleep)(level=2)
    assert "others on its GPU" in capsys.readouterr().out
    assert asked == [1, 2]


def test_a_worker_waits_and_sleeps_beside_others(tmp_path, monkeypatch):
    """Through vLLM's wrapper, by which its engine reaches a worker."""
    monkeypatch.setattr(WorkerWrapperBase, "init_device", WorkerWrapperBase.init_device)
    did = []

    class Stub:
        def init_device(self) -> None:
            did.append("device")

        def sleep(self, level: int) -> None:
            did.append(level)
            raise AssertionError(LESS_IS_FREE)

    gate = tmp_path / "gate"
    install(str(gate), sleeps=True)
    install(str(gate), sleeps=True)
    wrapper = WorkerWrapperBase.__new__(WorkerWrapperBase)
    wrapper.worker, wrapper.vllm_config = Stub(), VllmConfig()
    opener = threading.Timer(0.3, lambda: (did.append("open"), gate.touch()))
    opener.start()
    wrapper.init_device()
    wrapper.sleep(2)
    assert did == ["open", "device", 2]


def test_other_faults_are_raised():
    def sleep() -> None:
        raise AssertionError("something else")

    with pytest.raises(AssertionError, match="something else"):
        beside_others(sleep)()
