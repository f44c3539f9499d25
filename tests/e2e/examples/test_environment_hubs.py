"""Tests runs on environments of each hub with the tiny model: the packages are installed, and nothing is replaced.

pip installs each package into a virtual environment, in VIME_HUB_PYTHONS or a temporary folder. Harbor and NeMo Gym
need Python 3.12.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from test_train_algorithms import mean, series
from train_fixtures import ROOT, World, make_world, rows, run, samples, vime

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
EXAMPLE = ROOT / "examples/environments"
PACKAGES = {
    "verifiers": ["verifiers==0.3.1"],
    "tasksets": ["verifiers==0.4.0", "uv"],
    "harbor": ["harbor==0.26.0", "openai"],
    "openenv": ["openenv==0.10.0"],
    "nemo-gym": ["nemo-gym==0.4.0", "reasoning-gym"],
}
NEWER = ("harbor", "nemo-gym")
"""Packages that need Python 3.12."""
TASKSET = """
import verifiers.v1 as vf

class Data(vf.TaskData):
    number: int

class OddTask(vf.Task[Data, vf.State, vf.TaskConfig]):
    @vf.reward(weight=1.0)
    async def odd(self, trace) -> float:
        text = str(trace.last_reply)
        return sum(ord(character) % 2 for character in text) / max(1, len(text))

class OddTasks(vf.Taskset[OddTask, vf.TasksetConfig]):
    INFINITE = True

    def load(self):
        number = 0
        while True:
            yield OddTask(Data(name=f"odd {number}", prompt=f"Write {number}.", number=number), self.config.task)
            number += 1

__all__ = ["OddTasks"]
"""
ECHO = """
import sys
sys.path.insert(0, sys.argv[2])
import uvicorn
from openenv.core.env_server.http_server import create_app
from models import EchoAction, EchoObservation
from server.echo_env_environment import EchoEnvironment
app = create_app(EchoEnvironment, EchoAction, EchoObservation, env_name="echo_env", max_concurrent_envs=64)
uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
"""
GYM = """
import sys
import uvicorn
from nemo_gym.config_types import BaseServerConfig
from nemo_gym.server_utils import ServerClient
from omegaconf import OmegaConf
from resources_servers.reasoning_gym.app import ReasoningGymResourcesServer as Server
port = int(sys.argv[1])
config = Server.model_fields["config"].annotation(name="gym", host="127.0.0.1", port=port, entrypoint="app.py")
head = ServerClient(
    head_server_config=BaseServerConfig(host="127.0.0.1", port=port), global_config_dict=OmegaConf.create({})
)
app = Server(config=config, server_client=head).setup_webserver()
uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning")
"""


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    yield from make_world()


def newer_python() -> str:
    """Returns a Python 3.12."""
    found = [shutil.which("python3.12"), *Path.home().glob(".pyenv/versions/3.12*/bin/python3.12")]
    for python in filter(None, found):
        if subprocess.run([python, "-c", ""], capture_output=True).returncode == 0:
            return str(python)
    pytest.skip("no python3.12 on this machine")


@pytest.fixture(scope="module")
def python_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`python_of(hub)` is a Python that has the package of the hub."""
    folder = os.environ.get("VIME_HUB_PYTHONS") or tmp_path_factory.mktemp("hubs")

    def find(hub: str) -> Path:
        python = Path(folder) / hub / "bin" / "python"
        if not python.is_file():
            made = newer_python() if hub in NEWER else sys.executable
            subprocess.run([made, "-m", "venv", python.parents[1]], check=True)
            command = [python, "-m", "pip", "install", "-q", *PACKAGES[hub]]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode and "No matching distribution" in done.stderr:
                pytest.skip(f"pip finds no {PACKAGES[hub]} here: {done.stderr[-300:]}")
            assert done.returncode == 0, done.stderr
        return python

    return find


def trained(world: World, name: str, environment: str, *more: str) -> list[float]:
    """Returns the rewards of a run. Checks the samples of its last rollout, and the log-probs of all."""
    run_dir = world.root / name
    saved = ("--run-dir", str(run_dir), "--save-debug-rollout-data", str(run_dir / "samples/{rollout_id}.pt"))
    words = ("--config", str(EXAMPLE / "tiny.yaml"), "--hf-checkpoint", str(world.model), *saved)
    run(vime("train", *words, "--environment", environment, *more), world.root / f"{name}.out", timeout_s=500)
    rewards = series(world, name, "rollout/raw_reward")
    for row in rows(run_dir, "rollout/step").values():
        failed = row.get(
            "rollout/session/ended_environment", 0.0
        )  # verifiers raises an error for an empty answer
        assert row["rollout/session/prefix_mismatch"] == 0 and failed < 0.05
        assert row["rollout/session/ended_done"] == pytest.approx(1 - failed)
    for row in rows(run_dir, "train/step").values():
        assert row["train/train_rollout_logprob_abs_diff"] < 1e-4
    for sample in samples(run_dir, len(rewards) - 1):
        assert len(sample["rollout_log_probs"]) == len(sample["loss_mask"]) == sample["response_length"]
        assert sample["metadata"]["environment_task"]["environment"] == environment
    print(name, [round(reward, 2) for reward in rewards])
    return rewards


@contextmanager
def serving(python: Path, program: str, *words: str) -> Iterator[str]:
    """Runs a server of a hub, and yields its address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen([python, "-c", program, str(port), *words])
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(240):
            assert process.poll() is None, f"the server ended with status {process.poll()}"
            try:
                urllib.request.urlopen(f"{url}/openapi.json", timeout=5).close()
                break
            except OSError:
                time.sleep(0.5)
        yield url
    finally:
        process.kill()
        process.wait()


SHORT = ("--num-rollout", "2", "--rollout-batch-size", "4")


def test_the_policy_learns_the_rubric_of_verifiers(
    world: World, python_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(EXAMPLE))
    rewards = trained(world, "verifiers", f"verifiers:odd-characters?python={python_of('verifiers')}")
    assert mean(rewards[:2]) < 0.8 and mean(rewards[-2:]) > 0.9
    for sample in samples(world.root / "verifiers", 0):
        record = sample["metadata"]["session"]
        if record["ended"] == "environment":
            assert "EmptyModelResponseError('Model returned no content" in record["said"]
            assert sample["remove_sample"]
            continue
        assert record["turns"] == 2 and record["samples"] == 1
        assert 0 < sum(sample["loss_mask"]) < sample["response_length"], (
            "the second message is not trained on"
        )
        assert sample["metadata"]["environment_task"]["metrics"]["odd_share"] == pytest.approx(
            sample["reward"]
        )


def test_a_taskset_of_verifiers_runs_in_its_harness(
    world: World, python_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    (world.root / "odd_tasks.py").write_text(TASKSET)
    monkeypatch.setenv("PYTHONPATH", str(world.root))
    text = f"verifiers:odd-tasks?python={python_of('tasksets')}&tasks=16"
    more = ("--n-samples-per-prompt", "2", "--session-deadline-s", "240")
    rewards = trained(world, "tasksets", text, *SHORT, *more)
    assert all(0 < reward < 1 for reward in rewards)


def test_a_task_of_harbor_runs_in_its_container(
    world: World, python_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    if shutil.which("bwrap") is None:
        pytest.skip("no bubblewrap on this machine")
    monkeypatch.setenv("PYTHONPATH", str(EXAMPLE))
    own = "agent.import_path=one_answer:OneAnswer&environment.import_path=one_answer:Bubblewrap"
    text = f"harbor:{EXAMPLE / 'harbor-tasks'}?python={python_of('harbor')}&{own}"
    rewards = trained(world, "harbor", text, *SHORT, "--n-samples-per-prompt", "4")
    assert all(0 < reward < 1 for reward in rewards)


def test_the_echo_environment_of_openenv_pays_for_length(
    world: World, python_of: Callable[[str], Path]
) -> None:
    python = python_of("openenv")
    made: list[Any] = [python.with_name("openenv"), "init", "echo_env", "-o", world.root]
    subprocess.run(made, check=True, capture_output=True)
    with serving(python, ECHO, str(world.root / "echo_env")) as url:
        text = f"openenv:{url}?python={python}&tasks=8&steps=2&message=echoed_message"
        trained(world, "openenv", text, *SHORT)
    for sample in samples(world.root / "openenv", 1):
        assert 0 < sample["reward"] <= 2 and sample["metadata"]["environment_task"]["metrics"]["steps"] == 2


def test_a_resource_server_of_nemo_gym_verifies_answers(
    world: World, python_of: Callable[[str], Path]
) -> None:
    python = python_of("nemo-gym")
    where = "import resources_servers.reasoning_gym as r; print(list(r.__path__)[0])"
    found = subprocess.run([python, "-c", where], capture_output=True, text=True, check=True).stdout.split()[
        -1
    ]
    with serving(python, GYM) as url:
        text = f"nemo-gym:{url}?data={found}/data/example.jsonl"
        rewards = trained(world, "nemo-gym", text, *SHORT)
    assert all(0 <= reward < 1 for reward in rewards)
    for sample in samples(world.root / "nemo-gym", 1):
        assert sample["metadata"]["environment_task"]["metrics"]["score"] == pytest.approx(sample["reward"])
        assert sample["label"]
