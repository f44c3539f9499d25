"""Tests the error of a run that ran out of memory, and the findings of `vime doctor` for it."""

from __future__ import annotations

import pytest
from memory_cases import config
from test_measured_memory import FOUR, QWEN3_30B

from slime.cluster.memory_watch import MemoryWatch
from slime.memory.cards import CardMemory
from slime.memory.host import HostMemory, kills
from slime.memory.peaks import MemoryReading, Peaks
from slime.memory.processes import ProcessMemory
from slime.plan.units import GIB
from slime.tracking.events import Events
from slime.tracking.phases import TRAINING
from slime.tracking.run_record import recorded
from vime.doctor.post_mortem import check_end
from vime.memory import failure


@pytest.fixture
def peaks():
    found = Peaks(TRAINING, 0)
    found.add(
        MemoryReading(
            [CardMemory(0, 140 * GIB, 131 * GIB, {7: 100 * GIB, 9: 2 * GIB})],
            HostMemory(503 * GIB, 480 * GIB),
            shared_memory=GIB,
            processes={7: ProcessMemory(115 * GIB), 8: ProcessMemory(3 * GIB)},
            roles={7: "trainer-0", 8: "engine-0"},
        )
    )
    return found


def test_a_full_host_names_phase_processes_and_flags(peaks, monkeypatch):
    monkeypatch.setattr(failure, "read_hf_config", lambda path: QWEN3_30B)
    c = config(**FOUR, optimizer_cpu_offload=True)
    first, processes, flags = failure.full_host(c)(peaks, HostMemory(503 * GIB, 480 * GIB)).splitlines()
    assert first.startswith(
        "the run must leave memory of the host free, got 480.00 GiB in use of the 503.00 GiB of "
    )
    assert "(95.4%, without page cache) while it trains; vime has ended the run" in first
    assert processes == "memory of processes: trainer-0 115.00 GiB, engine-0 3.00 GiB; 1.00 GiB in /dev/shm"
    assert flags.startswith(
        "what lowers it: --optimizer-cpu-offload --optimizer-offload-fraction 0.9 (now 1) gives "
    )


def test_an_error_that_memory_may_have_caused_gets_the_memory(peaks, tmp_path, monkeypatch):
    watch = MemoryWatch(str(tmp_path))
    watch._now = peaks
    counts = iter((3, 5, 0, 0))
    monkeypatch.setattr(failure, "kills", lambda: next(counts))
    monkeypatch.setattr(failure, "read_hf_config", lambda path: QWEN3_30B)
    c = config(**FOUR, optimizer_cpu_offload=True)
    killed = "trainer-0 failed: its process died without an error: it was killed, ran out of memory, or"
    with pytest.raises(RuntimeError) as caught, failure.explained(c, watch):
        raise RuntimeError(killed)
    first, when, card, of_host, *rest = str(caught.value).splitlines()
    assert (first, when) == (killed, "memory while it trains, at its largest:")
    assert card == (
        "card 0: 131.00 GiB of 140.00 GiB in use: another program (pid 7) 100.00 GiB, another program (pid 9) 2.00 "
        "GiB, processes that the driver does not show here 29.00 GiB"
    )
    assert of_host.startswith("host: 480.00 GiB of the 503.00 GiB of the host in use")
    assert "the kernel has killed 2 processes for memory since the run began (see dmesg)" in rest
    with pytest.raises(RuntimeError, match="^a router is lost$"), failure.explained(c, watch):
        raise RuntimeError("a router is lost")


def test_kills_are_counted_on_the_host_and_in_cgroups(tmp_path):
    assert kills(tmp_path) == 0
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/vmstat").write_text("nr_free_pages 1\noom_kill 2\n")
    (tmp_path / "proc/self/cgroup").write_text("0::/job\n")
    assert kills(tmp_path) == 2
    folder = tmp_path / "sys/fs/cgroup/job"
    folder.mkdir(parents=True)
    (folder / "memory.events").write_text("low 0\noom 9\noom_kill 7\n")
    assert kills(tmp_path) == 7


def test_the_doctor_shows_where_the_memory_was(peaks, tmp_path):
    events = Events("memory", str(tmp_path))
    with pytest.raises(RuntimeError), recorded(tmp_path, rollouts=3):
        events.add("memory", **peaks.fields())
        events.close()
        raise RuntimeError(
            "out of device memory while training\nwhat lowers it: --max-tokens-per-gpu 4096 gives 3 GiB"
        )
    end, memory = check_end(tmp_path)[:2]
    assert end.found.startswith("out of memory: ")
    assert (memory.name, memory.status) == ("memory", "problem")
    assert memory.found == (
        "131.0 of 140.0 GiB of a card in training (pid 9 2.0, trainer-0 100.0); 480.0 of 503.0 GiB of the host in "
        "training (trainer-0 115.0, engine-0 3.0)"
    )
    assert memory.remedy == "--max-tokens-per-gpu 4096 gives 3 GiB"
