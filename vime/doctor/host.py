"""Checks of the host: memory, disks, limits, clock, compilers, writable directories."""

from __future__ import annotations

import os
import resource
import time
from pathlib import Path

from slime.agent.init import bubblewrap
from slime.memory.host import host_memory, host_total, meminfo
from slime.system.start_cache import triton_cache_folder
from vime.doctor.finding import GIB, MIB, Finding, WantedRun, judge, ok, problem, size, warning
from vime.doctor.machine import Machine, words

# README: a tiny run on CPUs takes 6 GB of memory; the trainer and the engine of a real model take more.
SMALL_MEMORY = 6 * 10**9
# slime/cluster/ray_start.py: the object store of Ray that a run starts on one host.
OBJECT_STORE = 512 * MIB
# slime/weight_sync/file_channel.py keeps two versions of the weights in shared memory (vime/driver.py).
WEIGHT_VERSIONS = 2
ROOMY_SHARED_MEMORY = 4 * GIB
# Space for logs and metrics, and for one checkpoint with optimizer state of a 0.5B model (16 bytes per parameter).
LOGS, SMALL_CHECKPOINT = 512 * MIB, 8 * GIB
# Ray warns below 8192 descriptors, and raises its soft limit to the hard limit.
DESCRIPTORS, FEW_DESCRIPTORS = 8192, 1024
# A tiny run on two CPU cores had up to 313 threads. Each thread counts as a process, and more cores start more threads.
PROCESSES, FEW_PROCESSES = 4096, 512
FIRST_YEAR = 2025


def check_cores(machine: Machine, wanted: WantedRun) -> list[Finding]:
    usable = len(os.sched_getaffinity(0))
    remedy = "give the run at least 2 cores (docker: --cpus 2); trainer and engine share one core now"
    return [judge("cpu cores", f"{usable} usable", remedy, fails=False, poor=usable < 2)]


def check_numa(machine: Machine, wanted: WantedRun) -> list[Finding]:
    nodes = sorted(path.name for path in machine.path("/sys/devices/system/node").glob("node[0-9]*"))
    return [ok("numa nodes", str(len(nodes)) if nodes else "not reported by this kernel")]


def check_memory(machine: Machine, wanted: WantedRun) -> list[Finding]:
    """Checks the total memory. Little free memory is only a warning, because another run may be using it."""
    found_memory, facts = host_memory(machine.root), meminfo(machine.root)
    if found_memory is None:
        return [warning("memory", "/proc/meminfo gives no total", "mount /proc")]
    total = host_total(machine.root) or found_memory.total
    free = min(facts.get("MemAvailable", total), found_memory.total - found_memory.used)
    note = " (limit of the container)" if total < facts["MemTotal"] else ""
    remedy = f"give the run at least {size(SMALL_MEMORY)}; more for a model larger than the tiny one"
    found = f"{size(total)}{note}, {size(min(free, total))} available"
    return [
        judge("memory", found, remedy, fails=total < SMALL_MEMORY / 2, poor=min(free, total) < SMALL_MEMORY)
    ]


def check_shared_memory(machine: Machine, wanted: WantedRun) -> list[Finding]:
    """Checks /dev/shm, which holds Ray's object store, the published weights of a run on one host, and NCCL's
    buffers."""
    path = machine.path("/dev/shm")
    if not path.is_dir():
        return [
            problem(
                "shared memory", "/dev/shm does not exist", "mount a tmpfs there (docker: --shm-size 16g)"
            )
        ]
    total = machine.space(path).total
    weights = 0
    if wanted.hf_checkpoint is not None:
        weights = sum(file.stat().st_size for file in wanted.hf_checkpoint.glob("*.safetensors"))
    needed = OBJECT_STORE + WEIGHT_VERSIONS * weights
    what = f"Ray's object store ({size(OBJECT_STORE)})"
    if weights:
        what += f" and {WEIGHT_VERSIONS} versions of the weights ({size(weights)} each)"
    remedy = (
        f"a run needs {size(needed)} there for {what}: docker run --shm-size 16g, in Kubernetes an emptyDir of medium "
        "Memory at /dev/shm"
    )
    if not os.access(path, os.W_OK):
        return [problem("shared memory", "/dev/shm is not writable", "mount it with mode 1777")]
    poor = not weights and total < ROOMY_SHARED_MEMORY
    if total >= needed and poor:
        remedy = f"{what} fits, but not two versions of the weights of a 1B model; docker run --shm-size 16g"
    return [judge("shared memory", f"{size(total)} at /dev/shm", remedy, fails=total < needed, poor=poor)]


def check_disk(machine: Machine, wanted: WantedRun) -> list[Finding]:
    """Checks the disks of the run directory (logs, metrics, checkpoints) and of the Hugging Face cache (models,
    data)."""
    run_dir = machine.space(wanted.run_dir).free
    cache = hf_home(machine)
    cached = machine.space(cache).free
    more = "free some space, or choose another directory with"
    return [
        judge(
            "disk, run directory",
            f"{size(run_dir)} free at {wanted.run_dir}",
            f"{more} --run-dir; a checkpoint takes about 16 bytes a parameter",
            fails=run_dir < LOGS,
            poor=run_dir < SMALL_CHECKPOINT,
        ),
        judge(
            "disk, model cache",
            f"{size(cached)} free at {cache}",
            f"{more} HF_HOME; models are downloaded to it",
            fails=False,
            poor=cached < SMALL_CHECKPOINT,
        ),
    ]


def check_descriptors(machine: Machine, wanted: WantedRun) -> list[Finding]:
    soft, hard = machine.limit(resource.RLIMIT_NOFILE)
    found = f"{_limit(soft)} (can be raised to {_limit(hard)})" if soft != hard else _limit(soft)
    remedy = f"allow {DESCRIPTORS} or more: ulimit -n {DESCRIPTORS}; docker run --ulimit nofile=65536:65536"
    # Ray raises the soft limit of its processes to the hard limit.
    return [
        judge(
            "file descriptors",
            found,
            remedy,
            fails=_below(hard, FEW_DESCRIPTORS),
            poor=_below(hard, DESCRIPTORS),
        )
    ]


def check_processes(machine: Machine, wanted: WantedRun) -> list[Finding]:
    """Checks the limits on processes. Threads count as processes, and a container may have a separate limit."""
    limits = {"ulimit -u": machine.limit(resource.RLIMIT_NPROC)[0]}
    pids = machine.read("/sys/fs/cgroup/pids.max") or "max"
    if pids.isdecimal():
        limits["container"] = int(pids)
    finite = {name: limit for name, limit in limits.items() if limit != resource.RLIM_INFINITY}
    if not finite:
        return [ok("processes", "unlimited")]
    name = min(finite, key=finite.__getitem__)
    remedy = f"allow {PROCESSES} or more: ulimit -u {PROCESSES}; docker run --pids-limit {PROCESSES}"
    least = finite[name]
    found = f"{least} ({name})"
    return [judge("processes", found, remedy, fails=least < FEW_PROCESSES, poor=least < PROCESSES)]


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else str(value)


def _below(value: int, least: int) -> bool:
    return value != resource.RLIM_INFINITY and value < least


def check_clock(machine: Machine, wanted: WantedRun) -> list[Finding]:
    """Checks the clock. A wrong clock breaks HTTPS downloads and the order of a run's records."""
    now = time.gmtime()
    found = time.strftime("%Y-%m-%d %H:%M:%S UTC", now)
    return [
        judge("clock", found, "set the clock (chronyc makestep)", fails=now.tm_year < FIRST_YEAR, poor=False)
    ]


def check_compiler(machine: Machine, wanted: WantedRun) -> list[Finding]:
    """Checks for a compiler. Triton compiles its launchers with a C compiler, and vLLM's CPU build its kernels with a
    C++ compiler."""
    names = [machine.environ["CC"]] if machine.environ.get("CC") else ["gcc", "clang", "cc"]
    for name in names:
        output = machine.run(name, "--version")
        if output.code == 0:
            return [ok("C compiler", output.text.splitlines()[0])]
    return [
        problem(
            "C compiler",
            f"none of {words(names)} runs",
            "install gcc and g++ (Debian: apt-get install gcc g++)",
        )
    ]


def check_sandboxes(machine: Machine, wanted: WantedRun) -> list[Finding]:
    """Checks for bubblewrap, in which a model's commands run if the host allows it, as for `--rm-type code`."""
    found = machine.run("bwrap", "--version")
    refused = found.text if found.code != 0 else bubblewrap.way(os.getuid() == 0).refused
    if not refused:
        return [ok("sandboxes", f"namespaces, by {found.text}")]
    remedy = f"{bubblewrap.INSTALL}, on a host that allows user namespaces; see docs/security.md"
    plain = f"plain processes with limits, the host's network in view ({refused})"
    return [warning("sandboxes", plain, remedy)]


def hf_home(machine: Machine) -> Path:
    """Returns the directory of Hugging Face's downloads."""
    environ = machine.environ
    cache = environ.get("XDG_CACHE_HOME") or machine.home() / ".cache"
    return Path(environ.get("HF_HOME") or Path(cache) / "huggingface")


def check_writable(machine: Machine, wanted: WantedRun) -> list[Finding]:
    """Checks that this user can write to the directories of a run."""
    triton = Path(triton_cache_folder(machine.environ, str(machine.home())))
    paths = {
        "run directory": (wanted.run_dir, True, "--run-dir"),
        "model cache": (hf_home(machine), False, "HF_HOME"),  # an existing model needs to be readable only
        "Triton cache": (triton, wanted.device == "cuda", "TRITON_CACHE_DIR"),
        "temporary files": (Path(machine.environ.get("TMPDIR") or machine.path("/tmp")), True, "TMPDIR"),
    }
    bad = {name: path for name, path in paths.items() if not _can_write(path[0])}
    if not bad:
        return [ok("writable", words(list(paths)))]
    return [
        judge(
            "writable",
            f"{name} {path} is not writable by user {os.getuid()}",
            f"change its owner, or set {setting} to a directory that is writable",
            fails=needed,
            poor=True,
        )
        for name, (path, needed, setting) in bad.items()
    ]


def _can_write(path: Path) -> bool:
    """Returns True if this user can create `path`, or can write to it if it exists."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return path.is_dir() and os.access(path, os.W_OK | os.X_OK)
