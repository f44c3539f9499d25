"""Kills real trainer ranks of a run with a tiny model. The run goes on, and its weights are equal, to the bit, to those
of ranks that were not killed."""

from __future__ import annotations

import hashlib
import io
import os
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
        parts = []
        while (part := self.trainers.next_weights(version, {"engine": 1}).result(120)) is not None:
            parts.append(part)
        (whole,) = parts
        self.digests[version] = digest(Path(whole.info["path"]))
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
