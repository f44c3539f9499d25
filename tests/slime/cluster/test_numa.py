"""Finds the CPUs near a GPU in a tree like Linux's /sys, and binds a real child process to some of them."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from slime.cluster.numa import (
    children_on,
    choose_cpus,
    find_gpu_cpus,
    format_cpus,
    nodes_with_cpus,
    parse_cpus,
)
from vime.pool import engine_server
from vime.vllm.server import VllmServer, VllmSpec

HGX = ("0000:19:00.0", "0000:9b:00.0")
GB200 = ("0008:01:00.0", "0019:01:00.0")


def sysfs(root: Path, nodes: dict[int, tuple[str, str]], devices: dict[str, int]) -> Path:
    """Writes a /sys with NUMA nodes (CPUs, distances) and their PCI devices."""
    folder = root / "devices/system/node"
    for number, (cpus, distance) in nodes.items():
        (folder / f"node{number}").mkdir(parents=True)
        (folder / f"node{number}/cpulist").write_text(f"{cpus}\n")
        (folder / f"node{number}/distance").write_text(f"{distance}\n")
    (folder / "online").write_text(format_cpus(nodes) + "\n")
    for bus, node in devices.items():
        (root / "bus/pci/devices" / bus).mkdir(parents=True)
        (root / "bus/pci/devices" / bus / "numa_node").write_text(f"{node}\n")
    return root


@pytest.fixture
def two_sockets(tmp_path: Path) -> Path:
    """Writes the /sys of an HGX host: two processors with hyperthreads, each with a GPU."""
    nodes = {0: ("0-55,112-167", "10 21"), 1: ("56-111,168-223", "21 10")}
    return sysfs(tmp_path, nodes, {HGX[0]: 0, HGX[1]: 1})


@pytest.fixture
def tray(tmp_path: Path) -> Path:
    """Writes the /sys of a GB200 tray: two Grace CPUs; NUMA nodes 2 and 10 are GPU memory. A GPU may be on either
    kind."""
    nodes = {
        0: ("0-71", "10 40 80 120"),
        1: ("72-143", "40 10 120 80"),
        2: ("", "80 120 10 160"),
        10: ("", "120 80 160 10"),
    }
    return sysfs(tmp_path, nodes, {GB200[0]: 0, GB200[1]: 10})


@pytest.mark.parametrize("text", ["", "0", "0-3", "0-3,8", "0,2,4-7,9"])
def test_lists_of_cpus_as_the_kernel_writes_them(text):
    assert format_cpus(parse_cpus(f"{text}\n")) == text


def test_a_gpu_is_near_the_processor_that_it_is_attached_to(two_sockets):
    everything = range(224)
    assert choose_cpus([HGX[0]], "auto", allowed=everything, sysfs=two_sockets) == (
        {*range(56), *range(112, 168)},
        "bound to CPUs 0-55,112-167 (NUMA node 0)",
    )
    cpus, line = choose_cpus(HGX, "auto", allowed=everything, sysfs=two_sockets)
    assert cpus == set(everything) and line == "bound to CPUs 0-223 (NUMA node 0, 1)"


def test_a_node_that_is_a_gpus_memory_has_no_cpus_and_the_nearest_that_has_is_taken(tray):
    assert list(nodes_with_cpus(tray)) == [0, 1]
    assert find_gpu_cpus(GB200[0], tray) == set(range(72))
    assert find_gpu_cpus(GB200[1], tray) == set(range(72, 144)), "node 10 is nearer to node 1"


def test_only_cpus_that_the_process_may_use_are_taken(two_sockets):
    assert choose_cpus([HGX[1]], "auto", allowed={0, 60, 61, 170}, sysfs=two_sockets) == (
        {60, 61, 170},
        "bound to CPUs 60-61,170 (NUMA node 1)",
    )
    assert choose_cpus([HGX[1]], "auto", allowed={0, 1}, sysfs=two_sockets) == (
        set(),
        "not bound: the CPUs near the GPU are not among those allowed (0-1)",
    )


def test_nothing_is_bound_where_it_is_off_or_not_known(two_sockets, tmp_path):
    assert choose_cpus(HGX, "off", sysfs=two_sockets) == (set(), "not bound (--numa-binding off)")
    unknown = "not bound: this host does not report which CPUs are near the GPU"
    for buses in ([""], [HGX[0], ""], ["0000:ff:00.0"]):
        assert choose_cpus(buses, "auto", sysfs=two_sockets) == (set(), unknown)
    (two_sockets / "bus/pci/devices" / HGX[0] / "numa_node").write_text("-1\n")  # a virtual machine
    assert choose_cpus([HGX[0]], "auto", sysfs=two_sockets) == (set(), unknown)
    single = sysfs(tmp_path / "one", {0: ("0-15", "10")}, {HGX[0]: 0})
    assert choose_cpus([HGX[0]], "auto", sysfs=single) == (set(), "not bound: all CPUs are on one NUMA node")


def test_this_machine_can_be_read():
    """This machine's /sys can be read, and its nodes have the CPUs that this process may use."""
    nodes = nodes_with_cpus()
    assert not nodes or os.sched_getaffinity(0) <= set().union(*nodes.values())
    cpus, line = choose_cpus(["0000:00:00.0"], "auto")
    assert line.startswith("bound to CPUs" if cpus else "not bound")


def affinity_of_a_child() -> set[int]:
    code = "import os; print(*os.sched_getaffinity(0))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(map(int, done.stdout.split()))


def test_children_run_on_the_cpus_and_this_process_stays_as_it_was():
    before = os.sched_getaffinity(0)
    one = {min(before)}
    others: list[set[int]] = []
    with children_on(one):
        assert affinity_of_a_child() == one
        other = threading.Thread(target=lambda: others.append(affinity_of_a_child()))
        other.start()
        other.join()
    assert os.sched_getaffinity(0) == before == affinity_of_a_child()
    with children_on(set()):
        assert affinity_of_a_child() == before
    with pytest.raises(ZeroDivisionError), children_on(one):
        1 / 0  # noqa: B018
    assert os.sched_getaffinity(0) == before


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one CPU is all of them")
def test_a_process_binds_itself_and_its_threads():
    code = (
        "import os, threading\nfrom slime.cluster.numa import bind\n"
        "bind({min(os.sched_getaffinity(0))})\n"
        "seen = []\nt = threading.Thread(target=lambda: seen.append(os.sched_getaffinity(0)))\nt.start(); t.join()\n"
        "print(len(os.sched_getaffinity(0)), *map(len, seen))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["1", "1"]


class Printing(VllmServer):
    """An engine server whose program prints the CPUs on which it may run."""

    def command(self) -> list[str]:
        return [sys.executable, "-c", "import os; print('child', *os.sched_getaffinity(0))"]


@pytest.mark.parametrize(("buses", "bound"), [((HGX[0],), True), ((), False)])
def test_an_engine_server_starts_on_the_cpus_of_its_gpus(tmp_path, monkeypatch, buses, bound):
    one, before = min(os.sched_getaffinity(0)), os.sched_getaffinity(0)
    nodes = {0: (str(one), "10 21"), 1: ("100000", "21 10")}
    tree = sysfs(tmp_path / "sys", nodes, {HGX[0]: 0})
    monkeypatch.setattr(engine_server, "choose_cpus", functools.partial(choose_cpus, sysfs=tree))
    spec = VllmSpec(
        model_path="", weight_dir="", run_key="k", log_path=str(tmp_path / "logs/e.log"), gpu_buses=buses
    )
    engine = Printing(spec)
    engine.start()
    while engine.poll() is None:
        time.sleep(0.02)
    engine.stop()
    lines = (tmp_path / "logs/e.log").read_text().splitlines()
    expected = {one} if bound else before
    assert lines[-1] == " ".join(["child", *map(str, expected)]) and os.sched_getaffinity(0) == before
    assert lines[:-1] == ([f"NUMA: bound to CPUs {one} (NUMA node 0)"] if bound else [])
