"""A process reads the weights of another process on the same GPU; plain data describes their location."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from slime.weight_sync.buckets import views
from slime.weight_sync.channel import Export, Worker
from slime.weight_sync.ipc_channel import IpcChannel

pytestmark = pytest.mark.gpu


def weights(version: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(version)
    shapes = {"small": (3,), "odd": (5, 7), "large": (1000, 1000), "half": (64, 33), "last": (2, 3, 4)}
    found = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    found["half"] = found["half"].to(torch.bfloat16)
    return found


def reader(orders: mp.SimpleQueue, answers: mp.SimpleQueue) -> None:
    """Runs an engine that opens the tensors that a line describes and answers with copies."""
    buckets = IpcChannel.on_engine(Worker.here(torch.device("cuda", 0), 0))
    while (line := orders.get()) is not None:
        try:
            info = json.loads(line)
            opened = views(buckets.take(info["handles"]), info["tensors"])
            answers.put({name: tensor.clone().cpu() for name, tensor in opened.items()})
        except ValueError as error:
            answers.put(str(error))


@pytest.fixture
def engine(tmp_path) -> Iterator[tuple[mp.SimpleQueue, mp.SimpleQueue]]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    context = mp.get_context("spawn")
    queues = context.SimpleQueue(), context.SimpleQueue()
    process = context.Process(target=reader, args=queues)
    process.start()
    yield queues
    queues[0].put(None)
    process.join(30)
    dist.destroy_process_group()


@pytest.fixture
def expandable() -> Iterator[None]:
    """Allocates in expandable segments. Cached blocks of earlier tests are freed, because torch would reuse them."""
    torch.cuda.empty_cache()
    torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
    yield
    torch._C._accelerator_setAllocatorSettings("expandable_segments:False")


def test_buckets_are_not_in_expandable_segments(expandable, engine):
    test_another_process_reads_the_bits_of_every_version(engine, 1 << 20)
    channel = IpcChannel(32 << 20, torch.device("cuda", 0))
    state = {name: tensor.cuda() for name, tensor in weights(0).items()}
    list(channel.parts(Export(state.items), 0, compare=False, receivers={}))
    other = torch.empty(32 << 20, dtype=torch.uint8, device="cuda")

    def is_expandable(tensor: torch.Tensor) -> bool:
        start, found = tensor.data_ptr(), torch.cuda.memory_snapshot()
        return next(
            each["is_expandable"]
            for each in found
            if each["address"] <= start < each["address"] + each["total_size"]
        )

    assert is_expandable(other) and not is_expandable(channel._buckets[0])


@pytest.mark.parametrize("limit", [1 << 30, 1 << 20, 4096])
def test_another_process_reads_the_bits_of_every_version(engine, limit):
    orders, answers = engine
    channel = IpcChannel(limit, torch.device("cuda", 0))
    for version in (1, 2, 3):
        wanted, got, parts = weights(version), {}, 0
        on_gpu = {name: tensor.cuda() for name, tensor in wanted.items()}
        for part in channel.parts(Export(on_gpu.items), version, compare=False, receivers={}):
            assert part.version == version and not part.lasting
            orders.put(json.dumps(part.info))
            got |= answers.get()
            parts += 1
        assert parts == {1 << 30: 1, 1 << 20: 3, 4096: 4}[limit]
        assert got.keys() == wanted.keys()
        assert all(
            torch.equal(got[name], wanted[name]) and got[name].dtype == wanted[name].dtype for name in wanted
        )


def test_everything_comes_twice_to_be_compared(engine):
    channel = IpcChannel(1 << 30, torch.device("cuda", 0))
    state = {name: tensor.cuda() for name, tensor in weights(0).items()}
    parts = list(channel.parts(Export(state.items), 7, compare=True, receivers={}))
    assert [part.info["load"] for part in parts] == [True, False]


def test_wrong_places_are_refused(engine):
    orders, answers = engine
    channel = IpcChannel(4096, torch.device("cuda", 0))
    state = {"w": torch.ones(16, device="cuda")}
    (part,) = channel.parts(Export(state.items), 0, compare=False, receivers={})
    name, dtype, shape, _ = part.info["tensors"][0]
    orders.put(json.dumps({**part.info, "tensors": [[name, dtype, shape, 4090]]}))
    assert "w must lie inside its bucket, got bytes 4090 to 4154 of 4096" in answers.get()
    orders.put(json.dumps({**part.info, "handles": {"GPU-0": []}}))
    assert "a bucket must be on this engine's GPU" in answers.get()
