"""Engines are killed while the trainer broadcasts: the real pool, channel and groups, over gloo."""

from __future__ import annotations

import gc
import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from engine_double import DoubleServer, digest

from slime.protocols import WeightUpdate
from slime.weight_sync.broadcast_channel import BroadcastChannel
from slime.weight_sync.channel import Export
from slime.weight_sync.file_channel import FileChannel
from slime.weight_sync.group import GroupAbandoned, TransferGroup, give_up
from slime.weight_sync.publisher import Publisher
from vime.pool.router import RouterSpec
from vime.vllm.control import VllmControl
from vime.vllm.pool import VllmEnginePool
from vime.vllm.server import VllmSpec

KEY = "broadcast-key"
CPU = torch.device("cpu")
BUCKETS, BUCKET_BYTES = 4, 8 * 2**20
TIMEOUT_S, SOON_S = 120.0, 15.0
"""Seconds: the broadcast's own timeout, which would pass if nothing gave up, and the limit for a slow machine. Giving
up takes about one second."""


def weights(version: int) -> dict[str, torch.Tensor]:
    """Returns more bytes than a socket holds, so that a bucket's sender notices a receiver that does not take it."""
    generator = torch.Generator().manual_seed(version)
    count = BUCKET_BYTES // 8
    return {f"layer.{i}": torch.randn(count, generator=generator) for i in range(2 * BUCKETS)}


class BroadcastRun:
    """A trainer, engines that can be killed on request, and their pool."""

    def __init__(self, root: Path, engines: int) -> None:
        self.root = root
        (weight_dir := root / "weights").mkdir(mode=0o700)
        self.version = 0
        self.channel, files = (
            BroadcastChannel(weight_dir, BUCKET_BYTES, CPU, TIMEOUT_S),
            FileChannel(weight_dir),
        )
        self.publisher = Publisher(Export(self._export), self.channel, files, compare=False)
        self.thread = ThreadPoolExecutor(1)  # like an actor: one call after the other
        fields = {"model_path": "", "run_key": KEY, "weight_dir": str(weight_dir), "start_timeout_s": 60}
        specs = [VllmSpec(log_path=str(root / f"{i}.log"), index=i, **fields) for i in range(engines)]
        router = RouterSpec(run_key=KEY, log_path=str(root / "router.log"))
        self.pool = VllmEnginePool(specs, router, spawn=DoubleServer, source=self)

    def _export(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields weights that the test generates."""
        yield from weights(self.version).items()

    def next_weights(self, version: int, receivers: dict[str, int]) -> Future[WeightUpdate | None]:
        return self.thread.submit(self.publisher.next, version, receivers)

    def weights_file(self) -> Future[WeightUpdate]:
        return self.thread.submit(self.publisher.file, self.version)

    def update(self, version: int) -> float:
        """Updates the engines and returns the seconds."""
        self.version = version
        began = time.monotonic()
        self.pool.publish(version)
        return time.monotonic() - began

    def doom(self, engine: int, **how: Any) -> None:
        VllmControl(self.pool.engine_urls[engine], KEY)._post("/doom", how)

    def lines(self, engine: int, start: str) -> list[str]:
        """Returns the lines of an engine's log with this start, over all its lives."""
        lines = (self.root / f"{engine}.log.requests").read_text().splitlines()
        return [line for line in lines if line.startswith(start)]

    def held(self, engine: int) -> list[dict[str, str]]:
        """Returns digests of an engine's tensors after each broadcast update."""
        return [json.loads(line.removeprefix("HOLDS ")) for line in self.lines(engine, "HOLDS")]

    def await_engines(self, count: int) -> None:
        end = time.monotonic() + 60
        while len(self.pool.engine_urls) < count:
            assert time.monotonic() < end, "no engine came back"
            time.sleep(0.05)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[int], BroadcastRun]]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    runs: list[BroadcastRun] = []

    def make(engines: int) -> BroadcastRun:
        runs.append(BroadcastRun(tmp_path, engines))
        runs[-1].pool.start()
        return runs[-1]

    yield make
    while runs:
        runs[-1].pool.stop()
        runs.pop().thread.shutdown()
    gc.collect()  # a pool refers to itself, and keeps the source of its weights with its group
    dist.destroy_process_group()


def digests(version: int) -> dict[str, str]:
    return {name: digest(tensor) for name, tensor in weights(version).items()}


@pytest.mark.parametrize(
    "doom",
    [
        # The first bucket of the next update: the engine is in the group and does not take it.
        {"part": BUCKETS + 1, "when": "stall"},
        pytest.param({"part": BUCKETS + 2, "when": "reach"}, marks=pytest.mark.slow),
        pytest.param({"part": BUCKETS + 3, "when": "leave"}, marks=pytest.mark.slow),  # between two buckets
        pytest.param({"part": 2 * BUCKETS, "when": "stall"}, marks=pytest.mark.slow),  # the last bucket
    ],
)
def test_an_engine_killed_in_an_update_leaves_it_to_the_others(
    start: Callable[[int], BroadcastRun], doom: dict[str, Any]
) -> None:
    run = start(3)
    run.update(1)
    assert [run.held(i) for i in range(3)] == [[digests(1)]] * 3
    first = run.pool.engine_urls[1]
    run.doom(1, **doom)
    assert run.update(2) < SOON_S
    for i in (0, 2):
        assert run.held(i) == [digests(1), digests(2)]
    run.await_engines(3)
    assert first not in run.pool.engine_urls
    loaded = [
        json.loads(line.split(" ", 2)[2])["update_info"]["info"]
        for line in run.lines(1, "POST /update_weights")
    ]
    assert loaded[-1] == {"path": str(run.root / "weights" / "weights-2" / "model.safetensors")}
    run.update(3)  # a group with the new engine
    assert [run.held(i)[-1] for i in range(3)] == [digests(3)] * 3
    run.pool.check_health()


@pytest.mark.slow
def test_an_engine_killed_before_it_joins_is_not_waited_for(start: Callable[[int], BroadcastRun]) -> None:
    run = start(2)
    run.doom(0, part=1, when="stall")
    assert run.update(1) < SOON_S
    assert run.held(1) == [digests(1)] and not run.held(0)
    run.await_engines(2)


@pytest.mark.slow
def test_without_engines_left_those_that_come_back_get_a_file(start: Callable[[int], BroadcastRun]) -> None:
    run = start(1)
    run.doom(0, part=2, when="stall")
    assert run.update(1) < SOON_S
    run.await_engines(1)
    assert "weights-1/model.safetensors" in run.lines(0, "POST /update_weights")[-1]
    assert VllmControl(run.pool.engine_urls[0], KEY).weight_version() == 1
    run.update(2)
    assert run.held(0) == [digests(2)]


def test_a_trainer_that_fails_ends_the_run_with_its_own_error(start: Callable[[int], BroadcastRun]) -> None:
    run = start(2)

    def fail(bucket: torch.Tensor, regions: object) -> None:
        raise FloatingPointError("the trainer's own")

    run.channel._send = fail
    began = time.monotonic()
    with pytest.raises(FloatingPointError, match="the trainer's own"):
        run.update(1)
    assert time.monotonic() - began < SOON_S


def join_and_stall(info: dict[str, Any]) -> None:
    group = TransferGroup(info, 1, CPU)
    group.start(torch.zeros(1))
    time.sleep(100)


@pytest.mark.slow
def test_who_waits_for_one_that_hangs_leaves_when_told(tmp_path: Path) -> None:
    """NCCL behaves like this: it does not notice that a process has ended."""
    info = {"store": str(tmp_path / "group"), "world": 2, "timeout_s": TIMEOUT_S}
    process = mp.get_context("spawn").Process(target=join_and_stall, args=(info,))
    process.start()
    group = TransferGroup(info, 0, CPU)
    group.start(torch.zeros(1))
    group.start(torch.zeros(BUCKET_BYTES * 8))
    group.settle(1)
    threading.Timer(0.2, give_up, (info,)).start()
    began = time.monotonic()
    with pytest.raises(GroupAbandoned, match="while this rank waited"):
        group.settle()
    assert 0.1 < time.monotonic() - began < SOON_S
    process.kill()
    process.join()


def test_a_group_that_was_given_up_is_not_joined(tmp_path: Path) -> None:
    info = {"store": str(tmp_path / "group"), "world": 2, "timeout_s": TIMEOUT_S}
    give_up(info)
    with pytest.raises(GroupAbandoned, match="was given up"):
        TransferGroup(info, 0, CPU)


def test_who_waits_too_long_gives_up_for_all(tmp_path: Path) -> None:
    info = {"store": str(tmp_path / "group"), "world": 2, "timeout_s": 0.2}
    with pytest.raises(GroupAbandoned, match="must come within 0 s"):
        TransferGroup(info, 0, CPU)
    with pytest.raises(GroupAbandoned, match="was given up"):
        TransferGroup(info, 1, CPU)
