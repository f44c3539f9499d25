"""Weights that one process sends to others, as the trainer does to engines: gloo here, NCCL on GPUs."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from slime.weight_sync import channel as channels
from slime.weight_sync.broadcast_channel import BroadcastChannel
from slime.weight_sync.channel import Export

CPU = torch.device("cpu")
Worker = tuple[str, int]
WORKERS: list[Worker] = [("engine-0-1", 0), ("engine-0-1", 1), ("engine-1-1", 0)]


def weights(version: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(version)
    shapes = {"small": (3,), "odd": (5, 7), "large": (100, 100), "half": (64, 33), "last": (2, 3, 4)}
    found = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    found["half"] = found["half"].to(torch.bfloat16)
    return found


def engine(name: str, worker: int, orders: mp.SimpleQueue, answers: mp.SimpleQueue) -> None:
    os.environ["VIME_ENGINE"] = name
    receiver = BroadcastChannel.on_engine(channels.Worker.here(CPU, worker))
    while (line := orders.get()) is not None:
        info = json.loads(line)
        try:
            with receiver.receive(info) as part:
                assert part is not None
                answers.put({key: part.get(key).clone() for key in part.shapes})
        except ValueError as error:
            answers.put(str(error))


class Engines:
    """Processes, one a worker; `update` sends a version to some of them and returns what each has then."""

    def __init__(self, root: Path) -> None:
        dist.init_process_group("gloo", init_method=f"file://{root}/store", rank=0, world_size=1)
        self.channel = BroadcastChannel(root, 4096, CPU, timeout_s=60)
        context = mp.get_context("spawn")
        self.queues = {worker: (context.SimpleQueue(), context.SimpleQueue()) for worker in WORKERS}
        self.processes = [
            context.Process(target=engine, args=(*worker, *queues)) for worker, queues in self.queues.items()
        ]
        for process in self.processes:
            process.start()

    def update(self, version: int, members: list[Worker], receivers: dict[str, int]) -> list[dict[str, Any]]:
        got: list[dict[str, Any]] = [{} for _ in members]
        state = weights(version)
        parts = self.channel.parts(Export(state.items), version, compare=False, receivers=receivers)
        part = next(parts)
        while part is not None:
            assert part.version == version and not part.lasting
            for member in members:
                self.queues[member][0].put(json.dumps(part.info))
            part = next(parts, None)  # sends what the engines were just told of
            for member, tensors in zip(members, got, strict=True):
                tensors |= self.queues[member][1].get()
        return got

    def close(self) -> None:
        for orders, _ in self.queues.values():
            orders.put(None)
        for process in self.processes:
            process.join(20)
        dist.destroy_process_group()


@pytest.fixture
def engines(tmp_path: Path) -> Iterator[Engines]:
    made = Engines(tmp_path)
    yield made
    made.close()


def test_all_workers_get_the_bits_and_groups_follow_the_engines(engines: Engines) -> None:
    for version in (1, 2):
        for got in engines.update(version, WORKERS, {"engine-0-1": 2, "engine-1-1": 1}):
            wanted = weights(version)
            assert got.keys() == wanted.keys()
            assert all(torch.equal(got[n], w) and got[n].dtype == w.dtype for n, w in wanted.items())
    (alone,) = engines.update(3, WORKERS[2:], {"engine-1-1": 1})
    assert all(torch.equal(alone[name], tensor) for name, tensor in weights(3).items())


def test_who_is_not_in_the_group_says_so(engines: Engines) -> None:
    state = weights(0)
    parts = engines.channel.parts(Export(state.items), 0, compare=False, receivers={"engine-7-1": 1})
    orders, answers = engines.queues["engine-1-1", 0]
    orders.put(json.dumps(next(parts).info))
    assert answers.get() == "VIME_ENGINE must be one of ['engine-7-1'], got engine-1-1"
