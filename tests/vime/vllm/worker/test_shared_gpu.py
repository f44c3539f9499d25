"""Tests sleep on a GPU with other users. tests/e2e/engines/test_engine_start.py tests its start gate with a real
server."""

from __future__ import annotations

import ast
import inspect
import json
import textwrap
import threading

import pytest
from vllm.config import VllmConfig
from vllm.v1.worker.gpu_worker import Worker

from vime.vllm.worker.settings import EngineSettings
from vime.vllm.worker.shared_gpu import LESS_IS_FREE, allow_other_memory_use
from vime.vllm.worker.workers import RunWorker


def test_vllm_says_so_at_the_end_of_sleep():
    """The allowed check is the last statement of the installed vLLM's worker before its log line."""
    (sleep,) = ast.parse(textwrap.dedent(inspect.getsource(Worker.sleep))).body
    assert isinstance(sleep, ast.FunctionDef)
    *_, check, log = sleep.body
    assert isinstance(check, ast.Assert) and isinstance(check.msg, ast.Constant)
    assert check.msg.value == LESS_IS_FREE
    assert ast.unparse(log).startswith("logger.info(")


def test_memory_that_others_take_is_no_error(capsys):
    with allow_other_memory_use():
        pass
    assert "others on its GPU" not in capsys.readouterr().out
    with allow_other_memory_use():
        raise AssertionError(LESS_IS_FREE)
    assert "others on its GPU" in capsys.readouterr().out


def test_a_worker_waits_for_its_gate_and_sleeps(tmp_path, monkeypatch):
    did = []

    class Device:
        """A stand-in for vLLM's worker, which needs a GPU."""

        model_runner = None

        def __init__(self, config, local_rank, rank, address, is_driver):
            assert (local_rank, rank, is_driver) == (0, 1, True) and address
            did.append(config.additional_config)

        def init_device(self):
            did.append("device")

        def sleep(self, level):
            did.append(level)
            raise AssertionError(LESS_IS_FREE)

    class Waiting(RunWorker, Device):
        pass

    gate = tmp_path / "gate"
    flag, value = EngineSettings(gate=str(gate)).flags()
    assert flag == "--additional-config"
    worker = Waiting(VllmConfig(additional_config={"other": 1, **json.loads(value)}), 0, 1, "file:///x", True)
    opener = threading.Timer(0.3, lambda: (did.append("open"), gate.touch()))
    opener.start()
    worker.init_device()
    worker.sleep(2)
    kept, *rest = did
    assert rest == ["open", "device", 2]
    assert kept["other"] == 1 and kept["vime"]["gate"] is None, "compiled code is kept under a hash of this"


def test_other_faults_are_raised():
    with pytest.raises(AssertionError, match="something else"), allow_other_memory_use():
        raise AssertionError("something else")
