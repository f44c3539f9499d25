"""A trainer's GPU sends weights to other GPUs over NCCL: their bits, their speed, and the state after a kill -9.

With three GPUs or more there is a second receiver, which outlives the first.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from slime.weight_sync.broadcast_channel import BroadcastChannel
from slime.weight_sync.channel import Export, Worker
from slime.weight_sync.group import give_up

pytestmark = pytest.mark.multi_gpu

LAYERS, WIDTH, BUCKET_BYTES = 32, 8192, 512 * 2**20
"""4 GiB of bfloat16 in matrices of 128 MiB."""
REGROUP_S = 20


def weights(version: int, device: torch.device) -> dict[str, torch.Tensor]:
    """Makes the weights of a version on a GPU; they are equal on every GPU."""
    generator = torch.Generator(device).manual_seed(version)
    return {
        f"layer.{i}": torch.randn((WIDTH, WIDTH), generator=generator, device=device, dtype=torch.bfloat16)
        for i in range(LAYERS)
    }


def receiver(name: str, index: int, orders: mp.SimpleQueue, answers: mp.SimpleQueue) -> None:
    """Runs an engine's worker. Its orders are {"check": version}, {"stall": true}, or the info of a part."""
    os.environ["VIME_ENGINE"] = name
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    buckets, held = BroadcastChannel.on_engine(Worker.here(device, 0)), {}
    answers.put("ready")
    while (line := orders.get()) is not None:
        order = json.loads(line)
        if "check" in order:
            wanted = weights(order["check"], device)
            same = [torch.equal(held[key], tensor) for key, tensor in wanted.items() if key in held]
            answers.put([len(same), sum(same)])
        elif "stall" in order:
            time.sleep(1000)
        else:
            with buckets.receive(order) as part:
                held |= {} if part is None else {name: part.get(name) for name in part.shapes}
            torch.cuda.synchronize()
            answers.put("given up" if part is None else "taken")


class Receiver:
    def __init__(self, name: str, index: int) -> None:
        context = mp.get_context("spawn")
        self.name, self.orders, self.answers = name, context.SimpleQueue(), context.SimpleQueue()
        self.process = context.Process(target=receiver, args=(name, index, self.orders, self.answers))
        self.process.start()
        assert self.answers.get() == "ready"

    def tell(self, order: dict[str, Any]) -> None:
        self.orders.put(json.dumps(order))

    def stop(self) -> None:
        self.process.kill()
        self.process.join()


class Trainer:
    def __init__(self, root: Path) -> None:
        self.device = torch.device("cuda", 0)
        torch.cuda.set_device(self.device)
        self.channel = BroadcastChannel(root, BUCKET_BYTES, self.device, timeout_s=600)

    def parts(self, state: dict[str, torch.Tensor], version: int, to: list[Receiver]) -> Iterator[Any]:
        names = {engine.name: 1 for engine in to}
        return self.channel.parts(Export(state.items), version, compare=False, receivers=names)

    def update(self, state: dict[str, torch.Tensor], version: int, to: list[Receiver]) -> float:
        """Sends an update with the driver's messages, without HTTP, and returns the seconds."""
        torch.cuda.synchronize()
        began = time.monotonic()
        parts = self.parts(state, version, to)
        part = next(parts)
        while part is not None:
            for engine in to:
                engine.tell(part.info)
            part = next(parts, None)
            assert [engine.answers.get() for engine in to] == ["taken"] * len(to)
        return time.monotonic() - began


@pytest.fixture
def trainer(tmp_path: Path) -> Iterator[Trainer]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield Trainer(tmp_path)
    dist.destroy_process_group()


@pytest.fixture
def engines() -> Iterator[list[Receiver]]:
    started = [Receiver(f"engine-{i}-1", i) for i in range(1, min(torch.cuda.device_count(), 3))]
    yield started
    for engine in started:
        engine.stop()


def check(engine: Receiver, version: int) -> None:
    engine.tell({"check": version})
    assert engine.answers.get() == [LAYERS, LAYERS], version


def test_bits_arrive_and_how_fast(trainer, engines):
    for version in range(4):  # the first update connects
        state = weights(version, trainer.device)
        seconds = trainer.update(state, version, engines)
        size = sum(tensor.nbytes for tensor in state.values())
        print(f"version {version}: {size / 1e9:.2f} GB in {seconds:.3f} s, {size / 1e9 / seconds:.0f} GB/s")
        for engine in engines:
            check(engine, version)
    assert size / 1e9 / seconds > 10, "GB/s: slower than files in /dev/shm"


@pytest.mark.parametrize("stalls", [True, False], ids=["while it is waited for", "while it receives"])
def test_after_a_kill_the_others_get_everything_anew(trainer, engines, stalls):
    """The kill comes in the second update, which reuses its group, at the third of eight buckets."""
    trainer.update(weights(1, trainer.device), 1, engines)
    first, *others = engines
    engines.append(other := Receiver("engine-1-2", 1))  # it starts beforehand, as that takes seconds
    state = weights(2, trainer.device)
    parts = trainer.parts(state, 2, [first, *others])
    for number in range(3):
        part = next(parts)
        for engine in (first, *others):
            engine.tell({"stall": True} if number == 2 and stalls and engine is first else part.info)
    killed: list[float] = []

    def kill() -> None:
        """Kills the receiver and gives up its group, as the driver does."""
        os.kill(first.process.pid, 9)
        killed.append(time.monotonic())
        first.process.join()
        give_up(part.info["group"])

    threading.Timer(1.0 if stalls else 0.001, kill).start()
    for _ in parts:  # the remaining parts have no receiver and must not wait
        pass
    while not killed:
        time.sleep(0.01)
    for engine in others:
        answers = [engine.answers.get() for _ in range(3)]
        assert answers[:2] == ["taken", "taken"] and answers[2] in ("taken", "given up")
    trainer.update(state, 2, [other, *others])
    seconds = time.monotonic() - killed[0]
    print(f"all weights in other engines {seconds:.1f} s after the kill")
    assert seconds < REGROUP_S
    for engine in (other, *others):
        check(engine, 2)
    trainer.update(weights(3, trainer.device), 3, [other, *others])
    check(other, 3)
    assert torch.ones(2**20, device=trainer.device).sum().item() == 2**20, "the trainer computes"
