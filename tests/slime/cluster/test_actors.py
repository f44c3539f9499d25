"""If several ranks fail, the run names the right one; the test uses real Ray actors."""

from __future__ import annotations

import gc
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
import torch
from local_ray import local_ray

from slime.cluster.actors import freeze_objects
from slime.cluster.calls import ActorError, first_failure_or_all
from slime.cluster.faults.memory_nodes import MemoryNodes, _MemoryKeeper
from slime.cluster.images import COLUMN, SOURCE, read_files, with_files, with_source
from slime.config import Config
from slime.vision.inputs import ImageInputs
from slime.vision.store import MediaStore


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    with local_ray(num_cpus=2):
        yield


@ray.remote(num_cpus=0, max_concurrency=8)  # a waiting call leaves the actor usable for later tests
class Rank:
    def ready(self) -> None:
        pass

    def complain(self) -> None:
        raise RuntimeError("connection closed by peer")

    def die(self, after_s: float) -> None:
        time.sleep(after_s)
        os._exit(9)

    def wait(self) -> None:
        time.sleep(60)


@pytest.fixture(scope="module")
def alive(cluster: None) -> list:
    return [Rank.remote() for _ in range(3)]


@pytest.fixture
def ranks(alive: list) -> list:
    """Yields three actors, and replaces each actor that a test killed."""
    for i, rank in enumerate(alive):
        try:
            ray.get(rank.ready.remote())
        except ray.exceptions.RayActorError:
            alive[i] = Rank.remote()
    ray.get([rank.ready.remote() for rank in alive])
    return list(alive)


def failure(tmp_path: Path, refs: list, liveness: dict | None = None) -> ActorError:
    calls = {ref: f"trainer-{i}" for i, ref in enumerate(refs)}
    with pytest.raises(ActorError) as caught:
        first_failure_or_all(Config.from_flat({"run_dir": str(tmp_path)}), calls, liveness or {})
    return caught.value


def test_the_rank_that_died_is_named_and_not_those_that_lost_it(tmp_path: Path, ranks: list) -> None:
    error = failure(
        tmp_path, [ranks[0].complain.remote(), ranks[1].complain.remote(), ranks[2].die.remote(1)]
    )
    assert str(error).startswith("trainer-2 failed: its process died")
    assert error.log.name == "trainer-2.log"


def test_an_error_of_a_rank_is_told_though_its_peers_wait_for_it(tmp_path: Path, ranks: list) -> None:
    began = time.monotonic()
    error = failure(tmp_path, [ranks[0].wait.remote(), ranks[1].complain.remote(), ranks[2].wait.remote()])
    at = f"(?:{re.escape(__file__)}|{re.escape(os.path.relpath(__file__))})"
    assert re.fullmatch(
        rf"trainer-1 failed: RuntimeError: connection closed by peer \(at {at}:\d+\)", str(error)
    )
    assert time.monotonic() - began < 20


def test_a_call_is_not_waited_for_when_an_actor_that_it_will_need_has_died(
    tmp_path: Path, ranks: list
) -> None:
    began = time.monotonic()
    error = failure(tmp_path, [ranks[0].wait.remote()], {ranks[1].die.remote(0.5): "trainer-7"})
    assert str(error).startswith("trainer-7 failed: its process died")
    assert time.monotonic() - began < 20


def test_a_wait_ends_with_what_its_check_raises(tmp_path: Path, ranks: list) -> None:
    """The calls continue. In the second wait the answer comes first and is returned."""
    config = Config.from_flat({"run_dir": str(tmp_path)})
    checks: list[float] = []

    def check() -> None:
        checks.append(time.monotonic())
        if len(checks) == 3:
            raise RuntimeError("an engine has ended")

    began = time.monotonic()
    with pytest.raises(RuntimeError, match="an engine has ended"):
        first_failure_or_all(config, {ranks[0].wait.remote(): "trainer-0"}, check=check)
    assert 2 < time.monotonic() - began < 20
    answered = {ranks[1].ready.remote(): "trainer-1"}
    assert first_failure_or_all(config, answered, check=lambda: None) == [None]


def test_a_call_that_is_answered_does_not_wait_for_lives(tmp_path: Path, ranks: list) -> None:
    config = Config.from_flat({"run_dir": str(tmp_path)})
    began = time.monotonic()
    calls = {ranks[0].ready.remote(): "rollout"}
    assert first_failure_or_all(config, calls, {ranks[1].wait.remote(): "trainer-0"}) == [None]
    assert time.monotonic() - began < 20


def test_what_a_process_is_made_of_is_out_of_later_collections() -> None:
    kept = [[] for _ in range(10_000)]
    freeze_objects()
    try:
        found = gc.get_objects()  # the objects that a full collection visits
        assert len(found) < len(kept) and not any(each is kept for each in found)
    finally:
        gc.unfreeze()


@ray.remote(num_cpus=0)
class Rollouts:
    """Has the files of images, and sends data that names them."""

    def put(self, data: dict) -> list:
        return [ray.put(with_source(data))]

    def read_images(self, paths: list[str]) -> list[bytes]:
        return read_files([path.replace("near", "far") for path in paths])


def test_data_names_the_actor_that_has_the_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder `far` stands for the folder of another host, on which it has the name `near`."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "here"))
    item = MediaStore(tmp_path / "near", 2**30).write("image", "ab", {"x": torch.ones(2)}, tokens=1).item
    (tmp_path / "near").rename(tmp_path / "far")
    rollouts = Rollouts.options(name="rollout").remote()
    (ref,) = ray.get(rollouts.put.remote({COLUMN: [ImageInputs((item,))]}))
    (text,) = ray.get(rollouts.put.remote({"tokens": [[1]]}))
    assert ray.get(text) == {"tokens": [[1]]}
    data = ray.get(ref)
    assert SOURCE in data
    (inputs,) = with_files(data)[COLUMN]
    assert torch.equal(inputs.tensors()["x"], torch.ones(2))
    assert inputs.items[0].path.startswith(str(tmp_path / "here"))


def test_a_lost_node_does_not_keep_the_states_of_another(tmp_path: Path) -> None:
    lost, kept = (tmp_path / name for name in ("lost", "kept"))
    for folder in (lost, kept):
        folder.mkdir()
    for number in range(5000):  # their removal takes longer than the answer of a lost node
        (kept / str(number)).touch()
    nodes = MemoryNodes(str(tmp_path))
    nodes._keepers = [_MemoryKeeper.options(num_cpus=0).remote(str(folder)) for folder in (lost, kept)]  # type: ignore[attr-defined]
    ray.get(nodes._keepers[1].__ray_ready__.remote())
    ray.kill(nodes._keepers[0])
    nodes.close()
    assert not kept.exists()
