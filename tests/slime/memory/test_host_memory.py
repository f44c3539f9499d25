"""The host's memory and its limits, read from the files of several kinds of hosts."""

from __future__ import annotations

from pathlib import Path

import pytest

from slime.memory.host import HostMemory, host_memory, host_total

GIB = 2**30
MEMINFO = "MemTotal: {total} kB\nMemFree: 1024 kB\nMemAvailable: {free} kB\nHugePages_Total: 0\n"


def host(root: Path, *, total: int = 512, free: int = 400, files: dict[str, str] | None = None) -> Path:
    """Makes a root folder with a host of `total` GiB (`free` GiB available), and with these files."""
    text = MEMINFO.format(total=total * 2**20, free=free * 2**20)
    for name, content in {"proc/meminfo": text, **(files or {})}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)
    return root


def test_a_host_without_limits(tmp_path):
    root = host(
        tmp_path,
        files={"proc/self/cgroup": "0::/user.slice\n", "sys/fs/cgroup/user.slice/memory.max": "max\n"},
    )
    assert host_memory(root) == HostMemory(512 * GIB, 112 * GIB)
    assert host_total(root) == 512 * GIB


@pytest.mark.parametrize("visible", [True, False], ids=["own path", "seen as the root"])
def test_the_limit_of_a_container_counts_without_page_cache(tmp_path, visible):
    """The container uses cgroup version 2. Without a namespace, the path is the host's; a container sees its own
    cgroup as the root."""
    folder = "sys/fs/cgroup" + ("/job" if visible else "")
    files = {
        "proc/self/cgroup": "0::/job\n",
        f"{folder}/memory.max": f"{100 * GIB}\n",
        f"{folder}/memory.current": f"{90 * GIB}\n",
        f"{folder}/memory.stat": f"anon {20 * GIB}\ninactive_file {40 * GIB}\nactive_file {25 * GIB}\n",
    }
    found = host_memory(host(tmp_path, files=files))
    assert found == HostMemory(100 * GIB, 25 * GIB, "the cgroup /job" if visible else "the cgroup /")
    assert host_total(tmp_path) == 100 * GIB


def test_the_tightest_of_several_cgroups_counts(tmp_path):
    base = "sys/fs/cgroup/slurm"
    files = {"proc/self/cgroup": "0::/slurm/step/task\n", f"{base}/step/task/memory.max": "max"}
    for path, limit, used in ((base, 200, 190), (f"{base}/step", 64, 10)):
        files |= {
            f"{path}/memory.max": str(limit * GIB),
            f"{path}/memory.current": str(used * GIB),
            f"{path}/memory.stat": "inactive_file 0\nactive_file 0\n",
        }
    found = host_memory(host(tmp_path, files=files))
    assert found == HostMemory(200 * GIB, 190 * GIB, "the cgroup /slurm")
    assert host_total(tmp_path) == 64 * GIB


def test_version_1(tmp_path):
    folder = "sys/fs/cgroup/memory/docker"
    files = {
        "proc/self/cgroup": "5:cpu,cpuacct:/docker\n4:memory:/docker\n0::/\n",
        f"{folder}/memory.limit_in_bytes": str(50 * GIB),
        f"{folder}/memory.usage_in_bytes": str(45 * GIB),
        f"{folder}/memory.stat": f"cache 9\ntotal_inactive_file {10 * GIB}\ntotal_active_file {5 * GIB}\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
    }
    found = host_memory(host(tmp_path, files=files))
    assert found == HostMemory(50 * GIB, 30 * GIB, "the cgroup /docker")


def test_a_limit_above_the_host_is_none(tmp_path):
    files = {"sys/fs/cgroup/memory.max": str(1000 * GIB), "sys/fs/cgroup/memory.current": str(900 * GIB)}
    assert host_memory(host(tmp_path, files=files)) == HostMemory(512 * GIB, 112 * GIB)
    assert host_total(tmp_path) == 512 * GIB


def test_without_proc(tmp_path):
    assert host_memory(tmp_path) is None and host_total(tmp_path) is None


def test_this_machine():
    found = host_memory()
    assert found is not None and 0 < found.used < found.total == host_total()
