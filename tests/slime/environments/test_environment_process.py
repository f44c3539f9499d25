"""Tests the process of an environment: its faults end its own episodes only, and nothing of it stays behind."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from slime.environments import process as processes
from slime.environments.hubs import Environment, Hub
from slime.environments.process import (
    EnvironmentFault,
    EnvironmentProcess,
    close_processes,
    get_process,
    living,
)

FILE = str(Path(__file__).with_name("scripted_connector"))
HUB = Hub(FILE, "a name", "json", "json")


def made(name: str = "scripted", hub: Hub = HUB, **values: Any) -> Environment:
    return Environment(f"scripted:{name}", hub, name, **values)


@pytest.fixture
def started() -> Iterator[Callable[..., EnvironmentProcess]]:
    found: list[EnvironmentProcess] = []

    def start(**arguments: Any) -> EnvironmentProcess:
        found.append(EnvironmentProcess(made(arguments=arguments)))
        return found[-1]

    yield start
    for process in found:
        process.end()
        process.wait(10)


async def episode(process: EnvironmentProcess, task: str) -> Any:
    return await process.finish("run_episode", base_url="", api_key="", model="", task=task)


def test_an_error_of_an_episode_is_one_line_and_the_process_goes_on(
    started: Callable[..., EnvironmentProcess],
) -> None:
    process = started(names=["0"])
    rows = process.call("load_prompts", split="s", limit=None).result(10)
    assert rows == [{"prompt": [{"role": "user", "content": "go"}], "label": "s", "task": "0"}]
    for task, said in (("raise", "ZeroDivisionError: division by zero"), ("exit", "SystemExit: 3")):
        with pytest.raises(EnvironmentFault, match=f"^{said}$"):
            asyncio.run(episode(process, task))
    assert asyncio.run(episode(process, "0"))["reward"] == 0.0


def test_a_process_that_ends_fails_its_episodes_and_starts_again() -> None:
    environment = made()
    try:
        first = get_process(environment)

        async def two() -> list[Any]:
            both = (episode(first, "wait"), episode(first, "die"))
            return await asyncio.gather(*both, return_exceptions=True)

        for error in asyncio.run(two()):
            assert isinstance(error, EnvironmentFault)
            assert str(error) == "its process has ended with status 3, and printed last: more text"
        assert living(environment) is None
        with pytest.raises(EnvironmentFault, match="status 3"):
            asyncio.run(episode(first, "0"))
        assert asyncio.run(episode(get_process(environment), "0"))["reward"] == 0.0
    finally:
        close_processes()
    assert living(environment) is None


def test_a_cancelled_episode_ends_and_a_blocked_process_is_ended(
    started: Callable[..., EnvironmentProcess],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(processes, "ANSWER_S", 0.5)

    async def cancelled(process: EnvironmentProcess, task: str) -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await episode(process, task)

    process = started()
    asyncio.run(cancelled(process, "wait"))
    time.sleep(0.8)
    assert not process.ended and asyncio.run(episode(process, "0"))["reward"] == 0.0
    asyncio.run(cancelled(process, "block"))
    with pytest.raises(EnvironmentFault, match="status -9"):
        asyncio.run(episode(process, "0"))
    assert "has not answered for 0.5 s, so it is ended with its 2 episodes" in caplog.text


@pytest.mark.parametrize("how", ["close", "end"])
def test_processes_that_an_environment_starts_end_with_it(
    started: Callable[..., EnvironmentProcess], how: str
) -> None:
    process = started(child=True)
    child = psutil.Process(int(asyncio.run(episode(process, "pid"))["reward"]))
    getattr(process, how)()
    process.wait(10)
    psutil.wait_procs([child], timeout=10)
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE


def test_a_process_that_has_just_ended_can_be_ended(
    started: Callable[..., EnvironmentProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    process = started()
    process.close()
    process.wait(10)
    monkeypatch.setattr(process._process, "poll", lambda: None)  # while another thread collects the status
    process.end()


@pytest.mark.parametrize(
    "environment, said",
    [
        (
            made("unknown"),
            f"--environment must name an environment that its hub can load, got 'scripted:unknown': "
            f"ModuleNotFoundError: No module named 'unknown'; install the environment for {sys.executable}, or "
            "correct its name and arguments",
        ),
        (
            made(hub=Hub(FILE, "a name", "no-such-hub", "no_such_hub")),
            f"--environment must have the package no-such-hub, got none in {sys.executable} for "
            "'scripted:scripted'; python -m venv hub && hub/bin/pip install no-such-hub, then add "
            "?python=hub/bin/python",
        ),
        (
            made(hub=Hub(FILE, "a name", "harbor", "json", (3, 99))),
            f"--environment must have Python 3.99 or newer for harbor, got Python "
            f"{sys.version_info[0]}.{sys.version_info[1]} ({sys.executable}) for 'scripted:scripted'; python3.99 -m "
            "venv hub && hub/bin/pip install harbor, then add ?python=hub/bin/python",
        ),
        (
            made(python="/nowhere/python"),
            "--environment must have a Python that exists as python, got '/nowhere/python' (No such file or "
            "directory) in 'scripted:scripted'; check the path",
        ),
    ],
)
def test_an_environment_that_cannot_be_loaded_is_named_in_one_line(environment: Any, said: str) -> None:
    with pytest.raises(ValueError) as error:
        EnvironmentProcess(environment)
    assert str(error.value) == said


def test_an_environment_that_does_not_start_is_named_after_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "START_S", 0.5)
    with pytest.raises(ValueError) as error:
        EnvironmentProcess(made("slow"))
    assert str(error.value) == (
        "--environment must name an environment that its hub can load, got 'scripted:slow': no environment after "
        f"0.5 s; install the environment for {sys.executable}, or correct its name and arguments"
    )


def test_the_process_has_its_programs_first_and_no_key_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VIME_RUN_KEY", "secret")
    monkeypatch.setenv("JUDGE_API_KEY", "kept")
    variables = processes._variables("/hub/bin/python")
    assert variables["PATH"] == f"/hub/bin{os.pathsep}{os.environ['PATH']}"
    assert "VIME_RUN_KEY" not in variables and variables["JUDGE_API_KEY"] == "kept"
