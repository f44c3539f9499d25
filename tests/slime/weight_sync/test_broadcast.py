"""One process sends weights to others, as the trainer does to engines: gloo here, NCCL on GPUs."""

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
from rank_processes import forks

from slime.weight_sync import channel as channels
from slime.weight_sync.broadcast_channel import BroadcastChannel
from slime.weight_sync.channel import Export
from slime.weight_sync.file_channel import FileChannel
from slime.weight_sync.publisher import Publisher
from slime.weight_sync.slices import Slice, SlicePosition, whole_slices

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
                answers.put(part and {key: part.get(key).clone() for key in part.shapes})
        except ValueError as error:
            answers.put(str(error))


class Engines:
    """One process per worker. `update` sends a version to some workers and returns the weights that each worker then
    has."""

    def __init__(self, root: Path) -> None:
        dist.init_process_group("gloo", init_method=f"file://{root}/store", rank=0, world_size=1)
        self.channel = BroadcastChannel(root, 4096, CPU, timeout_s=60)
        context = forks()
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
            part = next(parts, None)  # this sends the part that the engines now expect
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


def cut(version: int, rank: int) -> Iterator[Slice]:
    """Yields a rank's slices, for two ranks: half of the rows, or of the columns, or a whole tensor."""
    axes = {"odd": 0, "large": 1, "half": 0}
    for number, (name, tensor) in enumerate(weights(version).items()):
        if name not in axes:
            yield from whole_slices([(name, tensor)]) if number % 2 == rank else ()
            continue
        where, axis = [(0, size) for size in tensor.shape], axes[name]
        middle = tensor.shape[axis] // 2
        where[axis] = (middle, tensor.shape[axis]) if rank else (0, middle)
        position = SlicePosition(
            name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), tuple(where)
        )
        yield Slice(position, lambda position=position, tensor=tensor: position.of(tensor))


def trainer_rank(rank: int, root: Path, orders: mp.SimpleQueue, answers: mp.SimpleQueue) -> None:
    dist.init_process_group("gloo", init_method=f"file://{root}/ranks", rank=rank, world_size=2)
    channel, version = BroadcastChannel(root, 4096, CPU, timeout_s=60), 0
    publisher = Publisher(
        Export(weights(0).items, lambda: cut(version, rank)), channel, FileChannel(root / "w"), compare=False
    )
    while (order := orders.get()) is not None:
        version, receivers = order
        part = publisher.next(version, receivers)
        answers.put(None if part is None else json.dumps(part.info))
    os._exit(0)  # this does not wait for a group that was given up


class Ranks:
    """Two trainer ranks and the engines of WORKERS. The test sends them the driver's messages."""

    def __init__(self, root: Path) -> None:
        context = forks()
        self.trainers = [(context.SimpleQueue(), context.SimpleQueue()) for _ in range(2)]
        self.engines = {worker: (context.SimpleQueue(), context.SimpleQueue()) for worker in WORKERS}
        ranks = enumerate(self.trainers)
        self.processes = [
            context.Process(target=trainer_rank, args=(rank, root, *queues)) for rank, queues in ranks
        ]
        self.of_engines = {
            worker: context.Process(target=engine, args=(*worker, *queues))
            for worker, queues in self.engines.items()
        }
        for process in [*self.processes, *self.of_engines.values()]:
            process.start()

    def ask(self, version: int, receivers: dict[str, int]) -> None:
        for orders, _ in self.trainers:
            orders.put((version, receivers))

    def part(self) -> str | None:
        """Returns rank 0's description of a part. The other rank has the part at the same time, without a
        description."""
        first, second = (answers.get() for _, answers in self.trainers)
        assert second == (None if first is None else "{}")
        return first

    def close(self) -> None:
        for orders, _ in [*self.trainers, *self.engines.values()]:
            orders.put(None)
        for process in [*self.processes, *self.of_engines.values()]:
            process.join(20)
            process.kill()
            process.join()
            process.close()
        for queue in (queue for pair in [*self.trainers, *self.engines.values()] for queue in pair):
            queue.close()


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Ranks]:
    made = Ranks(tmp_path)
    yield made
    made.close()


def test_each_trainer_rank_sends_its_slices_also_after_an_engine_died(ranks: Ranks) -> None:
    receivers = {"engine-0-1": 2, "engine-1-1": 1}
    for version in (1, 2):
        got = update_of(ranks, version, WORKERS, receivers)
        for held in got:
            wanted = weights(version)
            assert held.keys() == wanted.keys()
            assert all(torch.equal(held[n], w) and held[n].dtype == w.dtype for n, w in wanted.items())
    ranks.ask(3, receivers)
    told = ranks.part()
    ranks.of_engines["engine-1-1", 0].kill()
    ranks.ask(3, receivers)  # the ranks send, and the others wait for the lost engine
    for worker in WORKERS[:2]:
        ranks.engines[worker][0].put(told)
    BroadcastChannel.give_up(json.loads(told))  # as the driver does
    ranks.part()
    for worker in WORKERS[:2]:  # gloo may have delivered the part before
        ranks.engines[worker][1].get()
    for held in update_of(ranks, 3, WORKERS[:2], {"engine-0-1": 2}):
        assert all(torch.equal(held[name], tensor) for name, tensor in weights(3).items())


def update_of(
    ranks: Ranks, version: int, members: list[Worker], receivers: dict[str, int]
) -> list[dict[str, Any]]:
    got: list[dict[str, Any]] = [{} for _ in members]
    ranks.ask(version, receivers)
    while (told := ranks.part()) is not None:
        for member in members:
            ranks.engines[member][0].put(told)
        ranks.ask(version, receivers)  # this sends the part
        for member, held in zip(members, got, strict=True):
            held |= ranks.engines[member][1].get()
    return got
