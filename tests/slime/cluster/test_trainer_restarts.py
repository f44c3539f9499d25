"""Kills real trainer ranks of a run with a tiny model. The run goes on, and its weights are equal, to the bit, to those
of ranks that were not killed."""

from __future__ import annotations

import hashlib
import io
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import deadly_hooks
import pytest
import torch
from deadly_hooks import order
from local_ray import local_ray
from test_trainers import data_of
from trainer_cases import make_config, make_samples, rank_data

from slime import loop
from slime.cluster.calls import first_failure_or_all
from slime.cluster.faults.lost import RankLost
from slime.cluster.placement import reserve_devices
from slime.cluster.trainers import Trainers
from slime.config import Config
from slime.protocols import NoEngines, RolloutBatch
from slime.tracking.console import StepLine
from slime.tracking.journal import read_events
from slime.tracking.report import Reporter
from slime.tracking.trackers import Trackers

ROLLOUTS = 4
FLAGS = {
    "rollout_data_postprocess_path": "deadly_hooks.in_step",
    "custom_update_weight_post_write_path": "deadly_hooks.after_write",
    "update_weight_transport": "disk",
    "update_weight_disk_keep_files": True,
    "num_rollout": ROLLOUTS,
    "debug_train_only": True,
    "max_trainer_restarts": 3,
}


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(deadly_hooks.__file__).parent))
        with local_ray(num_cpus=2):
            yield


class TrainingRun(NoEngines):
    """A run of the loop with real trainer ranks: a pool of one engine that reads the files of the weights, and a
    rollout manager whose data is ready."""

    def __init__(self, config: Config) -> None:
        self.config, self.digests = config, dict[int, str]()
        self.trained: list[int] = []
        placed = reserve_devices(config)
        self.trainers = Trainers(config, placed)
        self.ends = [placed.release, self.trainers.stop]
        self.trainers.take_built(first_failure_or_all(config, self.trainers.building))

    def run(self) -> dict[int, str]:
        report = Reporter(self.config, Trackers([self]), StepLine(stream=io.StringIO()))
        loop.run(self.config, self, self.trainers, self, report)
        report.close()
        return self.digests

    def publish(self, version: int) -> dict[str, float]:
        digests = []
        while (part := self.trainers.next_weights(version, {"engine": 1}).result(120)) is not None:
            digests.append(digest(Path(part.info["path"])))
        (self.digests[version],) = digests
        return {}

    def generate(self, rollout_id: int, saves: bool, version: int) -> Future[RolloutBatch]:
        future: Future[RolloutBatch] = Future()
        data = data_of(self.config, rollout_id)
        future.set_result(RolloutBatch(data, {}, tokens=1, forward_flops=1.0))
        return future

    def progress(self) -> tuple[int, int]:
        return 0, 0

    def close(self, state: str) -> None: ...

    def log(self, metrics: Any, step: int, step_key: str) -> None:
        if step_key == "train/step":
            self.trained.append(step)


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def start(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., TrainingRun]]:
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    running: list[TrainingRun] = []

    def start_one(**flags: Any) -> TrainingRun:
        own = {"run_dir": str(tmp_path / "run"), "weight_dir": str(tmp_path / "weights")}
        running.append(TrainingRun(make_config(root, **FLAGS | own | flags)))
        return running[-1]

    yield start_one
    for one in running:
        for end in reversed(one.ends):
            end()


def undisturbed(build: Callable[..., Any], folder: Path, **flags: Any) -> dict[int, str]:
    """Returns the digests of the weights that a trainer in this process publishes."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        own = {"run_dir": str(folder)}
        trainer = build(**FLAGS | own | flags)
        digests = {}
        for version in range(ROLLOUTS + 1):
            if version:
                trainer.train(version - 1, rank_data(trainer.config, make_samples(version - 1)))
            update = trainer.next_weights(version, {"engine": 1})
            assert trainer.next_weights(version, {"engine": 1}) is None
            digests[version] = digest(Path(update.info["path"]))
        return digests
    finally:
        torch.set_num_threads(threads)


def test_killed_in_an_update_and_in_a_step(
    build: Callable[..., Any], start: Callable[..., TrainingRun], tmp_path: Path
) -> None:
    wanted = undisturbed(build, tmp_path / "alone")
    run = start(save=str(tmp_path / "save"), save_interval=2)
    for moment in ("write-2", "step-3"):
        order(tmp_path / "run", moment)
    began = time.monotonic()
    assert run.run() == wanted
    print(f"{time.monotonic() - began:.1f} s")
    assert run.trained == list(range(ROLLOUTS))
    back = list(read_events(tmp_path / "run", ("trainer_restarted",)))
    print([event["seconds"] for event in back])
    assert [(event["rollout"], event["repeated"]) for event in back] == [(0, 2), (2, 1)]


@pytest.mark.parametrize(
    ("number", "ranks"),
    [
        pytest.param(signal.SIGKILL, 2, marks=pytest.mark.slow),
        pytest.param(signal.SIGSTOP, 1, marks=pytest.mark.slow),
        pytest.param(signal.SIGSTOP, 2, marks=pytest.mark.slow),
    ],
)
def test_ranks_continue_from_memory_to_the_bit(
    start: Callable[..., TrainingRun], tmp_path: Path, number: int, ranks: int
) -> None:
    """A rank dies or stops in a step, while another rank waits for it. A rank that dies does so again in an update."""
    flags = {"actor_num_gpus_per_node": ranks, "distributed_timeout_minutes": 0.25}
    alone = start(run_dir=str(tmp_path / "alone"), weight_dir=str(tmp_path / "alone-weights"), **flags)
    wanted = alone.run()
    alone.trainers.stop()
    memory = {"recover_from": "memory", "memory_dir": str(tmp_path / "memory")}
    run = start(**flags, **memory)
    moments = {"step-1": 1} if number == signal.SIGSTOP else {"step-1": 1, "write-3": 3}
    for moment in moments:
        order(tmp_path / "run", moment, number)
    assert run.run() == wanted and len(set(wanted.values())) == ROLLOUTS + 1
    assert run.trained == list(range(ROLLOUTS))
    lost, back = (list(read_events(tmp_path / "run", (f"trainer_{kind}",))) for kind in ("lost", "restarted"))
    assert [(event["rollout"], event["repeated"]) for event in back] == [(i, 0) for i in moments.values()]
    seconds = [event["seconds"] for event in back]
    print(f"{signal.Signals(number).name}, {ranks} ranks: {seconds} s, load {os.getloadavg()[0]:.1f}")
    stopped = "does not answer" if ranks == 1 else "answer|Timed out|closed"
    assert all(re.search("died|closed" if number == signal.SIGKILL else stopped, e["text"]) for e in lost)


@pytest.mark.slow
def test_a_crash_that_repeats_at_its_step_ends_the_run(
    start: Callable[..., TrainingRun], tmp_path: Path
) -> None:
    run = start(actor_num_gpus_per_node=2, recover_from="memory", memory_dir=str(tmp_path / "memory"))
    order(tmp_path / "run", "step-1", times=3)  # two ranks may die at once
    with pytest.raises(RankLost, match="^trainer-. failed: (its process died|.*closed)"):
        run.run()
    (back,) = read_events(tmp_path / "run", ("trainer_restarted",))
    assert back["rollout"] == 1 and run.trained == [0]
