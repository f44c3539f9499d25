"""Tests timers on a GPU: CUDA events measure the GPU's time without waiting for it, and phases their peak memory."""

import pickle
import time
from pathlib import Path

import pytest
import torch

from slime.config import Config
from slime.tracking import Timers
from slime.tracking.memory import device_memory, leave_free
from slime.tracking.traces.memory_history import MemoryHistory

pytestmark = pytest.mark.gpu

GIB = 2**30


def work(repeats: int) -> None:
    """Runs 1.1 TFLOP per repeat, about 1.5 ms on an H200, with one launch on the host."""
    a = torch.ones(8192, 8192, device="cuda", dtype=torch.bfloat16)
    for _ in range(repeats):
        torch.mm(a, a)


def test_parts_are_the_gpus_time_and_nothing_waits_for_them():
    work(40)
    torch.cuda.synchronize()
    timers = Timers.on(torch.device("cuda", torch.cuda.current_device()))
    began = time.perf_counter()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with timers.measure("trainer"):
            with timers.measure("forward"):
                work(40)
            with timers.measure("backward"):
                work(80)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    queued = time.perf_counter() - began
    torch.cuda.synchronize()
    waited = time.perf_counter() - began
    times = timers.flush()
    forward, backward = times["perf/forward_time"], times["perf/backward_time"]
    assert queued < 0.5 * forward  # the host was done long before the GPU
    assert 1.8 < backward / forward < 2.2
    assert forward + backward == pytest.approx(times["perf/trainer_time"], rel=0.02)
    assert 0.9 * waited < times["perf/trainer_time"] < waited


def test_peak_memory_of_phases():
    timers = Timers.on(torch.device("cuda", torch.cuda.current_device()))
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated() / GIB
    with timers.measure("actor_train"):
        with timers.measure("forward"):
            x = torch.empty(3 * GIB, dtype=torch.uint8, device="cuda")
            del x
        with timers.measure("backward"):
            y = torch.empty(1 * GIB, dtype=torch.uint8, device="cuda")
        z = torch.empty(4 * GIB, dtype=torch.uint8, device="cuda")
        del y, z
    with timers.measure("optimizer"):
        pass
    peaks = {name: value - before for name, value in timers.flush().items() if name.endswith("_peak_gib")}
    wanted = {"forward": 3.0, "backward": 1.0, "actor_train": 5.0, "optimizer": 0.0}
    assert peaks == pytest.approx({f"perf/{name}_peak_gib": gib for name, gib in wanted.items()}, abs=0.01)


def test_cost_on_the_host():
    """A measurement has two events and four reads of the allocator's statistics; the step of a micro-batch takes
    milliseconds."""
    timers = Timers.on(torch.device("cuda", torch.cuda.current_device()))
    for _ in range(100):
        with timers.measure("forward"):
            pass
    began = time.perf_counter()
    for _ in range(1000):
        with timers.measure("forward"):
            pass
    cost = (time.perf_counter() - began) / 1000
    print(f"measure on a GPU: {cost * 1e6:.1f} us of the host")
    assert cost < 500e-6
    timers.flush()


def test_cached_blocks_leave_the_bytes_free_that_others_allocate_later():
    device = torch.device("cuda", torch.cuda.current_device())
    torch.cuda.empty_cache()
    total, held = device_memory(device), torch.cuda.memory_reserved(device)
    assert total is not None
    limit = held + 2 * GIB
    leave_free(device, total - limit)
    try:
        for size in (1.5, 1.75, 1.9):  # no cached block is large enough for the next size
            torch.empty(int(size * GIB), dtype=torch.uint8, device=device)
            assert torch.cuda.memory_reserved(device) <= limit
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(3 * GIB, dtype=torch.uint8, device=device)
    finally:
        leave_free(device, 0)


@pytest.mark.parametrize("when", ["after a rollout", "out of memory"])
def test_a_snapshot_has_the_stack_of_an_allocation(tmp_path: Path, when: str) -> None:
    flags = {"record_memory_history": True, "memory_snapshot_num_steps": 2, "run_dir": str(tmp_path)}
    history = MemoryHistory(Config.from_flat(flags), "trainer-0")
    kept = torch.empty(3 * 2**20, dtype=torch.uint8, device="cuda")
    path = tmp_path / "profile/trainer-0-memory.pickle"
    if when == "out of memory":
        with pytest.raises(torch.OutOfMemoryError), history.around():
            torch.empty(2**50, dtype=torch.uint8, device="cuda")
    else:
        history.trained(0)
        assert not path.exists()
        history.trained(1)
    content = path.read_bytes()
    allocations = [entry for device in pickle.loads(content)["device_traces"] for entry in device]
    mine = [entry for entry in allocations if entry["action"] == "alloc" and entry["size"] == kept.nbytes]
    assert any(frame["filename"] == __file__ for entry in mine for frame in entry["frames"])
    history.trained(2)
    assert path.read_bytes() == content, "one snapshot"
