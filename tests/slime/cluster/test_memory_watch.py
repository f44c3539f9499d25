"""Tests the watch of a run's memory on real processes: their sizes by role and phase, and the end of the run on a
full host."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from slime.cluster.memory_watch import HostMemoryError, MemoryWatch
from slime.memory.cards import CardMemory
from slime.memory.host import HostMemory
from slime.memory.peaks import MemoryReading, Peaks
from slime.memory.processes import ProcessMemory, find_roles, process_memory, proportional
from slime.plan.units import GIB
from slime.tracking.journal import Event, read_events
from slime.tracking.phases import FIRST_WEIGHTS, GENERATING, HAND_OVER, LOADING, TRAINING

HOLD = "import sys; held = bytearray(b'x') * (int(sys.argv[1]) << 20); print('ready', flush=True); sys.stdin.read()"


@pytest.fixture
def holder(tmp_path):
    """Starts a process that writes to logs/trainer-0.log and has 64 MiB."""
    log = tmp_path / "logs" / "trainer-0.log"
    log.parent.mkdir()
    with log.open("w") as file:
        process = subprocess.Popen([sys.executable, "-c", HOLD, "64"], stdin=subprocess.PIPE, stdout=file)
    wait_for(lambda: "ready" in log.read_text())
    yield process
    process.communicate()


def wait_for(condition: Callable[[], bool], patience_s: float = 20.0) -> None:
    end = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)


def memory_events(run_dir: Path) -> list[Event]:
    return list(read_events(run_dir, kinds=("memory",)))


def test_the_role_of_a_process_is_its_log(holder, tmp_path):
    roles = find_roles(tmp_path / "logs", os.getpid(), [os.getppid()])
    assert roles == {holder.pid: "trainer-0", os.getpid(): "driver", os.getppid(): "other"}
    found, share = process_memory(holder.pid), proportional(holder.pid)
    assert found is not None and share is not None
    assert 64 * 2**20 < found.anonymous < found.resident and 64 * 2**20 < share < found.resident
    assert process_memory(2**30) is None and proportional(2**30) is None


def test_the_largest_values_of_each_phase_are_recorded(holder, tmp_path):
    with MemoryWatch(str(tmp_path), every_s=0.05) as watch:
        wait_for(lambda: watch.now.samples > 1)
        assert watch.now.phase == LOADING
        with watch.phase(FIRST_WEIGHTS):
            wait_for(lambda: watch.now.samples > 0)
        watch.set_rollout(3)
        for timer, phase in (("train_wait", GENERATING), ("sleep", HAND_OVER), ("train", TRAINING)):
            watch.observe(timer, begins=True)
            wait_for(lambda phase=phase: watch.now.phase == phase and watch.now.samples > 0)
            watch.observe("forward", begins=True)  # not a phase of a run
            watch.observe(timer, begins=False)
        assert watch.now.phase == GENERATING  # engines generate between two other phases
    events = memory_events(tmp_path)
    phases = [event["phase"] for event in events]
    assert phases[:2] == [LOADING, FIRST_WEIGHTS] and {GENERATING, HAND_OVER, TRAINING} <= set(phases)
    of_training = next(event for event in events if event["phase"] == TRAINING)
    assert of_training["rollout"] == 3 and events[0].get("rollout") is None
    trainer = of_training["processes"]["trainer-0"]
    assert trainer["anonymous_gib"] == pytest.approx(process_memory(holder.pid).anonymous / GIB, abs=0.002)
    host = of_training["host"]
    assert 0 < host["used_gib"] < host["total_gib"] and host["limit"]


def test_a_stay_keeps_the_largest_of_its_samples():
    def sample(card: int, host: int, trainer: int) -> MemoryReading:
        return MemoryReading(
            [CardMemory(0, 80 * GIB, card * GIB, {7: (card - 1) * GIB, 9: GIB})],
            HostMemory(500 * GIB, host * GIB),
            shared_memory=host,
            processes={7: ProcessMemory(trainer * GIB), 8: ProcessMemory(GIB, shared=GIB)},
            roles={7: "trainer-0", 8: "trainer-0"},
            proportional={"trainer-0": trainer * GIB},
        )

    peaks = Peaks(TRAINING, 2)
    for one in (sample(10, 40, 5), sample(70, 30, 9), sample(20, 50, 1)):
        peaks.add(one)
    fields = peaks.fields()
    assert (fields["phase"], fields["rollout"], fields["samples"]) == (TRAINING, 2, 3)
    (card,) = fields["cards"]
    assert card == {"card": 0, "used_gib": 70, "total_gib": 80, "by_gib": {"trainer-0": 69, "pid 9": 1}}
    assert fields["host"]["used_gib"] == 50
    assert fields["processes"]["trainer-0"] == {
        "anonymous_gib": 10,
        "shared_gib": 1,
        "files_gib": 0,
        "pss_gib": 9,
    }


def test_a_full_host_ends_the_run_with_the_reason(tmp_path):
    """96 of 100 GiB are in use: the kernel would soon kill a process."""
    for name, text in {
        "proc/meminfo": f"MemTotal: {100 << 20} kB\nMemAvailable: {4 << 20} kB\n",
        "proc/self/cgroup": "0::/\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)

    def explain(peaks: Peaks, host: HostMemory) -> str:
        return f"{peaks.phase}: {host.share:.0%} of {host.limit}"

    with (
        pytest.raises(HostMemoryError, match="^loading: 96% of the host$"),
        MemoryWatch(str(tmp_path / "run"), explain, root=tmp_path, every_s=0.05),
    ):
        time.sleep(30)
    (event, *_) = memory_events(tmp_path / "run")
    assert event["host"]["used_gib"] == 96


def test_the_reason_survives_a_wait_in_compiled_code(tmp_path):
    """`ray.wait` raises a SystemError that hides the exception of a signal handler."""
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 100 kB\nMemAvailable: 1 kB\n")
    with (
        pytest.raises(HostMemoryError, match="^the host is full$"),
        MemoryWatch(str(tmp_path / "run"), lambda *_: "the host is full", root=tmp_path, every_s=0.05),
    ):
        try:
            time.sleep(30)
        except HostMemoryError as error:
            raise SystemError("CoreWorker.wait returned a result with an exception set") from error


def test_without_an_explanation_a_full_host_is_left_alone(tmp_path):
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 100 kB\nMemAvailable: 1 kB\n")
    with MemoryWatch(str(tmp_path / "run"), root=tmp_path, every_s=0.01) as watch:
        wait_for(lambda: watch.now.samples > 2)
