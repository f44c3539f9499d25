"""Compares timers, peaks of memory, percentiles and traces with hand-computed figures."""

from __future__ import annotations

import gzip
import json
import math
import time

import pytest
import torch

from slime.config import Config
from slime.config.sections.debug import profiled_steps
from slime.rules.data import check_profile_steps
from slime.tracking import Timers
from slime.tracking.memory import PeakMemory, resident_peak_gib
from slime.tracking.percentiles import StepFigures
from slime.tracking.profiler import StepProfiler, trace_path


class Clock:
    """A clock that the test sets."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_times_accumulate_nest_and_start_anew():
    clock = Clock()
    timers = Timers(clock)
    with timers.measure("train"):
        clock.now = 2.0
        with timers.measure("actor_train"):
            clock.now = 5.0
    with timers.measure("actor_train"):
        clock.now = 6.5
    assert timers.flush() == {"perf/train_time": 5.0, "perf/actor_train_time": 4.5}
    assert timers.flush() == {}


def test_the_same_name_counts_once_and_survives_an_error():
    clock = Clock()
    timers = Timers(clock)
    with pytest.raises(RuntimeError), timers.measure("rollout"), timers.measure("rollout"):
        clock.now = 3.0
        raise RuntimeError("lost")
    with timers.measure("sleep"):
        clock.now = 4.0
        assert timers.flush() == {"perf/rollout_time": 3.0}
    assert timers.flush() == {"perf/sleep_time": 1.0}


def test_wait_ratio_is_of_the_measured_step():
    clock = Clock()
    timers = Timers(clock)
    with timers.measure("step"):
        with timers.measure("train_wait"):
            clock.now = 1.0
        with timers.measure("train"):
            clock.now = 3.0
        clock.now = 4.0
    times = {"perf/train_wait_time": 1.0, "perf/train_time": 2.0, "perf/step_time": 4.0}
    assert timers.flush() == {**times, "perf/wait_time_ratio": 0.25}
    with timers.measure("train_wait"):
        pass
    assert timers.flush() == {"perf/train_wait_time": 0.0}


def test_real_time():
    timers = Timers()
    with timers.measure("rollout"):
        time.sleep(0.05)
    assert 0.05 <= timers.flush()["perf/rollout_time"] < 1.0


def test_spans_are_read_by_flush_alone():
    """Reading a CUDA event waits for it. So the ends of a span reach `seconds` late, and in pairs."""
    ticks, read = iter(range(100)), []

    def seconds(start: int, end: int) -> float:
        read.append((start, end))
        return 0.5 * (end - start)

    timers = Timers(lambda: next(ticks), seconds)
    with timers.measure("trainer"):
        for _ in range(2):
            with timers.measure("forward"):
                pass
    assert read == []
    assert timers.flush() == {"perf/forward_time": 1.0, "perf/trainer_time": 2.5}
    assert read == [(1, 2), (3, 4), (0, 5)]


class Allocator:
    """An allocator's statistics: bytes now, and their peak since the last reset."""

    now = peak = 0

    def use(self, change: int) -> None:
        self.now += change
        self.peak = max(self.peak, self.now)

    def read(self) -> int:
        return self.peak

    def reset(self) -> None:
        self.peak = self.now


def test_peak_memory_of_nested_phases():
    allocator, gib = Allocator(), 2**30
    timers = Timers(Clock(), memory=PeakMemory(allocator.read, allocator.reset))
    allocator.use(9 * gib)
    allocator.use(-8 * gib)  # before any phase, so it counts for no phase
    with timers.measure("actor_train"):
        for extra in (3, 2):
            with timers.measure("forward"):
                allocator.use(extra * gib)
                allocator.use(-extra * gib)
        with timers.measure("backward"):
            allocator.use(1 * gib)
        allocator.use(5 * gib)
        allocator.use(-6 * gib)
    with timers.measure("optimizer"):
        pass
    peaks = {name: value for name, value in timers.flush().items() if name.endswith("_gib")}
    assert peaks == {
        "perf/forward_peak_gib": 4.0,
        "perf/backward_peak_gib": 2.0,
        "perf/actor_train_peak_gib": 7.0,
        "perf/optimizer_peak_gib": 1.0,
    }
    assert timers.flush() == {}


def test_resident_peak_sees_a_tensor_that_is_gone():
    before = resident_peak_gib()
    size = int((before + 0.25) * 2**30)
    # Together with the resident tensors it exceeds any earlier peak.
    tensor = torch.ones(size, dtype=torch.uint8)
    del tensor
    assert before + 0.25 <= resident_peak_gib() < 2 * before + 1


def test_percentiles_over_the_run_leave_out_the_first_step_and_traced_ones():
    figures = StepFigures(gpus=4)
    first = figures.add(100.0, 1000)
    assert first == {
        "perf/step_time": 100.0,
        "perf/step_tokens_per_sec": 10.0,
        "perf/step_tokens_per_gpu_per_sec": 2.5,
    }
    for i in range(1, 11):  # 1 .. 10 seconds, and 40 tokens per second each
        last = figures.add(float(i), 40 * i)
        figures.add(1000.0, 1, count=False)
    assert last["perf/step_time_p50"] == 5.5
    assert last["perf/step_time_p90"] == pytest.approx(9.1)  # a tenth of the way from 9 to 10
    assert last["perf/step_time_p99"] == pytest.approx(9.91)
    assert {last[f"perf/step_tokens_per_gpu_per_sec_p{p}"] for p in (50, 90, 99)} == {10.0}
    assert last["perf/step_tokens_per_sec_p99"] == 40.0
    assert figures.add(7.0, 0).keys() & {"perf/step_tokens_per_sec"} == set()


def test_profile_steps_are_half_open():
    assert profiled_steps(None) == range(0) and list(profiled_steps("2:4")) == [2, 3]
    for text in ("3:3", "4:2", "3", "-1:2", ":2", "1:", "a:b", "1:2:3"):
        with pytest.raises(ValueError, match=f"--profile-steps must be A:B .*, got {text}; 2:4 traces"):
            profiled_steps(text)


def test_profile_steps_that_trace_nothing_are_refused():
    def check(**flags):
        check_profile_steps(Config.from_flat({"num_rollout": 4, **flags}))

    check(profile_steps=None, debug_rollout_only=True)
    check(profile_steps="3:9")
    check(profile_steps="8:9", num_rollout=None)  # with --num-epoch
    with pytest.raises(ValueError, match="--profile-steps must begin below --num-rollout, got 4:5 and 4"):
        check(profile_steps="4:5")
    with pytest.raises(ValueError, match="--profile-steps must not be combined with --debug-rollout-only"):
        check(profile_steps="1:2", debug_rollout_only=True)


def test_trace_has_the_timers_ranges_of_its_rollouts_alone(tmp_path, capsys):
    timers = Timers()
    profiler = StepProfiler(range(1, 2), tmp_path, "trainer-3", timers, torch.device("cpu"))
    times = []
    for rollout_id in range(3):
        with profiler.around(rollout_id), timers.measure("trainer"), timers.measure("forward"):
            torch.ones(8, 4) @ torch.ones(4, 2)
        times.append(timers.flush())
    path = trace_path(tmp_path, "trainer-3", 1)
    assert path == tmp_path / "profile" / "trainer-3-rollout-1.json.gz"
    assert list(path.parent.iterdir()) == [path]
    assert capsys.readouterr().out == f"trace of rollout 1: {path}\n"
    assert ["perf/profile_time" in t for t in times] == [False, True, False]
    with gzip.open(path) as file:
        events = {e["name"]: e for e in json.load(file)["traceEvents"] if e.get("ph") == "X"}
    whole, inner, product = events["trainer"], events["forward"], events["aten::mm"]
    assert product["args"]["Input Dims"] == [[8, 4], [4, 2]]
    assert whole["ts"] <= inner["ts"] <= product["ts"]
    assert product["dur"] <= inner["dur"] <= whole["dur"]
    assert math.isclose(inner["dur"] / 1e6, times[1]["perf/forward_time"], abs_tol=0.01)


def test_a_rollout_that_fails_leaves_no_trace_and_no_running_profiler(tmp_path):
    timers = Timers()
    profiler = StepProfiler(range(5), tmp_path, "trainer-0", timers, torch.device("cpu"))
    with pytest.raises(ZeroDivisionError), profiler.around(0):
        raise ZeroDivisionError
    assert not timers.tracing and not (tmp_path / "profile").exists()
    with profiler.around(1):
        pass
    assert trace_path(tmp_path, "trainer-0", 1).exists()
