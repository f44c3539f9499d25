"""vLLM's packed broadcast sends weights from one GPU to a receiver on another: their bits, and the error after a
kill."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from slime.weight_sync.channel import Export, Worker
from slime.weight_sync.group import give_up
from vime.vllm.packed_channel import PackedNcclChannel

pytestmark = pytest.mark.multi_gpu
BUCKET_BYTES = 8 * 2**20
NAME = "engine-1-1"


def weights(version: int, device: torch.device, rows: int = 1024) -> dict[str, torch.Tensor]:
    """Makes 64 MiB of bfloat16 with 1,024 rows, with a tensor that is no multiple of any alignment. They are equal on
    every GPU."""
    generator = torch.Generator(device).manual_seed(version)
    shapes = [(rows, 1024 + index) for index in range(32)] + [(7,)]
    return {
        f"layer.{index}": torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)
        for index, shape in enumerate(shapes)
    }


def receive(orders: mp.SimpleQueue, answers: mp.SimpleQueue) -> None:
    """Runs an engine's worker. Its orders are the info of a part, or a version to compare with."""
    os.environ["VIME_ENGINE"] = NAME
    device = torch.device("cuda", 1)
    torch.cuda.set_device(device)
    receiver, held = PackedNcclChannel.on_engine(Worker.here(device, 0)), {}
    answers.put("ready")
    while (order := orders.get()) is not None:
        if isinstance(order, int):
            wanted = weights(order, device)
            answers.put([len(held), sum(torch.equal(held[name], tensor) for name, tensor in wanted.items())])
            continue
        with receiver.receive(order) as part:
            assert part is not None
            held |= {name: part.get(name) for name in part.shapes}
        answers.put("taken")


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[tuple[mp.Process, mp.SimpleQueue, mp.SimpleQueue]]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    context = mp.get_context("spawn")
    orders, answers = context.SimpleQueue(), context.SimpleQueue()
    process = context.Process(target=receive, args=(orders, answers))
    process.start()
    assert answers.get() == "ready"
    yield process, orders, answers
    process.kill()
    process.join()
    dist.destroy_process_group()


def make_channel(tmp_path: Path, bucket_bytes: int = BUCKET_BYTES) -> PackedNcclChannel:
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    return PackedNcclChannel(tmp_path, bucket_bytes, device, timeout_s=60)


def test_bits_arrive(tmp_path: Path, engine: tuple[mp.Process, mp.SimpleQueue, mp.SimpleQueue]) -> None:
    _, orders, answers = engine
    channel = make_channel(tmp_path)
    for version in range(3):  # the first update connects
        state = weights(version, channel.device)
        parts = channel.parts(Export(state.items), version, compare=False, receivers={NAME: 1})
        part, count = next(parts), 0
        while part is not None:
            orders.put(part.info)
            part, count = next(parts, None), count + 1
            assert answers.get() == "taken"
        assert count > 4
        orders.put(version)
        assert answers.get() == [33, 33], version


def test_a_lost_engine_is_an_error(
    tmp_path: Path, engine: tuple[mp.Process, mp.SimpleQueue, mp.SimpleQueue]
) -> None:
    """The receiver is killed before it takes the second part. The driver then gives the group up. A part has 512 MiB,
    because NCCL's buffers hold smaller parts without a receiver."""
    process, orders, answers = engine
    channel = make_channel(tmp_path, 512 * 2**20)
    state = weights(0, channel.device, rows=16384)
    parts = channel.parts(Export(state.items), 0, compare=False, receivers={NAME: 1})
    orders.put(next(parts).info)
    second = next(parts)
    assert answers.get() == "taken"
    process.kill()
    threading.Timer(1, lambda: give_up(second.info["group"])).start()
    with pytest.raises(RuntimeError, match="must reach all engines, got one that is lost"):
        next(parts)
