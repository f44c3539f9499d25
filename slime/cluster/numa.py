"""Binds a process to the CPUs that are nearest to its GPUs. Linux, standard library only.

A host with two processors has two NUMA nodes, and each has its own cores and memory. A process on the cores of the
other processor reaches its GPU through the link between the two. Only CPUs are bound. Memory follows, because Linux
allocates a page on the node of the core that touches the page first. On a GB200, each GPU's memory is a NUMA node
without cores. Such nodes are not counted, and nothing is bound to them.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

SYSFS = Path("/sys")


def parse_cpus(text: str) -> set[int]:
    """Parses the kernel's list format: "0-3,8" -> {0, 1, 2, 3, 8}."""
    cpus: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return cpus


def format_cpus(cpus: Collection[int]) -> str:
    """Formats CPUs in the kernel's list format: {0, 1, 2, 3, 8} -> "0-3,8"."""
    parts: list[list[int]] = []
    for cpu in sorted(cpus):
        if parts and cpu == parts[-1][-1] + 1:
            parts[-1].append(cpu)
        else:
            parts.append([cpu])
    return ",".join(str(p[0]) if len(p) == 1 else f"{p[0]}-{p[-1]}" for p in parts)


def nodes_with_cpus(sysfs: Path = SYSFS) -> dict[int, set[int]]:
    """Maps each NUMA node that has CPUs to its CPUs."""
    found = {}
    for folder in (sysfs / "devices/system/node").glob("node[0-9]*"):
        if cpus := parse_cpus((folder / "cpulist").read_text(encoding="utf-8")):
            found[int(folder.name.removeprefix("node"))] = cpus
    return dict(sorted(found.items()))


def find_gpu_cpus(bus: str, sysfs: Path = SYSFS) -> set[int]:
    """Returns the CPUs of the NUMA node of the PCI device `bus`, or of the nearest node that has CPUs.

    The result is empty if the firmware does not report the device's node, as in many virtual machines.
    """
    file = sysfs / "bus/pci/devices" / bus / "numa_node"
    if not file.is_file() or (node := int(file.read_text(encoding="utf-8"))) < 0:
        return set()
    nodes = nodes_with_cpus(sysfs)
    if node in nodes:
        return nodes[node]
    row = sysfs / f"devices/system/node/node{node}/distance"
    if not nodes or not row.is_file():
        return set()
    # The row has one distance for each online node, in the order of the node numbers.
    online = sorted(parse_cpus((sysfs / "devices/system/node/online").read_text(encoding="utf-8")))
    distance = dict(zip(online, map(int, row.read_text(encoding="utf-8").split()), strict=True))
    return nodes[min(nodes, key=lambda other: (distance[other], other))]


def choose_cpus(
    buses: Sequence[str], mode: str, *, allowed: Collection[int] | None = None, sysfs: Path = SYSFS
) -> tuple[set[int], str]:
    """Returns (CPUs to bind to, a line that names them and the reason). Without CPUs, the process is not bound.

    `buses` has the PCI addresses of the process's GPUs. The result is the union of their CPUs. `mode` is
    --numa-binding. `allowed` has the CPUs that the process may use now. A container or a scheduler may limit them.
    """
    if mode == "off":
        return set(), "not bound (--numa-binding off)"
    nodes = nodes_with_cpus(sysfs)
    if len(nodes) < 2:
        return set(), "not bound: all CPUs are on one NUMA node"
    known = [bus for bus in buses if bus]
    near = [find_gpu_cpus(bus, sysfs) for bus in known]
    if len(known) < len(buses) or not all(near):
        return set(), "not bound: this host does not report which CPUs are near the GPU"
    allowed = os.sched_getaffinity(0) if allowed is None else allowed
    cpus = set().union(*near) & set(allowed)
    if not cpus:
        return set(), f"not bound: the CPUs near the GPU are not among those allowed ({format_cpus(allowed)})"
    where = [str(node) for node, its in nodes.items() if its & cpus]
    return cpus, f"bound to CPUs {format_cpus(cpus)} (NUMA node {', '.join(where)})"


def bind(cpus: Collection[int]) -> None:
    """Binds all threads of this process, and the threads that they start later."""
    bound: set[int] = set()
    while (
        new := {int(task) for task in os.listdir("/proc/self/task")} - bound
    ):  # a thread may have started in between
        for thread in new:
            with contextlib.suppress(ProcessLookupError):  # the thread has ended
                os.sched_setaffinity(thread, cpus)
        bound |= new


@contextlib.contextmanager
def children_on(cpus: Collection[int]) -> Iterator[None]:
    """Makes the processes that this thread starts in the block, and their child processes, run on `cpus`.

    Without CPUs, they run on all CPUs of this thread. After the block, the thread itself is bound as before.
    """
    if not cpus:
        yield
        return
    before = os.sched_getaffinity(0)  # affinity of this thread
    os.sched_setaffinity(0, cpus)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
