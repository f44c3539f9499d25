"""A command attacks other processes: the sandbox's owner, its first process, and the process of the run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from sandbox_cases import PYTHON, as_another_user, run

ATTACKS = """
import ctypes, itertools, os, resource, signal

libc = ctypes.CDLL(None)

def attempt(action, *words):
    try:
        action(*words)
    except (OSError, ValueError):
        pass

pids = {1, os.getppid(), *(int(name) for name in os.listdir("/proc") if name.isdigit())} - {0, os.getpid()}
for pid in pids:
    for limit in range(16):
        attempt(resource.prlimit, pid, limit, (4, 4))
    attempt(os.setpriority, os.PRIO_PROCESS, pid, 19)
    attempt(os.setpriority, os.PRIO_PGRP, pid, 19)
    attempt(os.sched_setscheduler, pid, os.SCHED_IDLE, os.sched_param(0))
    attempt(os.sched_setaffinity, pid, {0})
    libc.ptrace(16, pid, 0, 0)
    libc.process_vm_writev(pid, 0, 0, 0, 0, 0)
    for name in ("mem", "oom_score_adj", "comm", "coredump_filter", "clear_refs", "fd/0", "fd/1", "fd/3"):
        def write():
            with open(f"/proc/{pid}/{name}", "wb", buffering=0) as file:
                file.write(b"900")
        attempt(write)
    for number in range(1, 65):
        if number not in (signal.SIGSTOP, signal.SIGKILL):
            attempt(os.kill, pid, number)
attempt(os.setpriority, os.PRIO_USER, 0, 19)
attempt(os.kill, -1, signal.SIGKILL)
for descriptor in range(3, 4096):
    attempt(os.close, descriptor)
attempt(os.kill, 1, signal.SIGKILL)
attempt(os.kill, os.getppid() or 1, signal.SIGKILL)
print("tried", flush=True)
"""


def state(pid):
    limits = Path(f"/proc/{pid}/limits").read_text()
    return limits, os.getpriority(os.PRIO_PROCESS, pid), os.sched_getaffinity(pid), os.sched_getscheduler(pid)


def owners(sandbox):
    """Returns the host's processes that own the sandbox, without its first process."""
    pids = [sandbox._process.pid]
    children = Path(f"/proc/{pids[0]}/task/{pids[0]}/children").read_text().split()
    return [os.getpid(), *pids, *(int(child) for child in children[:1])]


def test_a_command_cannot_change_its_owner(isolation):
    async def body(sandbox):
        before = {pid: state(pid) for pid in owners(sandbox)}
        await sandbox.write_file("attack.py", ATTACKS)
        result = await sandbox.exec(f"exec {PYTHON} -I attack.py", timeout=20)
        assert result.stdout == "tried\n"
        assert {pid: state(pid) for pid in before} == before
        assert (await sandbox.exec("echo alive")).stdout == "alive\n"

    if isolation == "namespaces" or os.getuid() == 0:
        run(isolation, body)


def test_a_command_sees_the_processes_of_its_sandbox_only(namespaces_work):
    async def body(sandbox):
        return await sandbox.exec("echo $PPID; ls /proc | grep -c '^[0-9]'; cat /proc/1/status | grep NSpid")

    if namespaces_work:
        parent, count, first = run("namespaces", body).stdout.splitlines()
        # The processes are the shell, ls, grep, and process 1.
        assert (parent, int(count), first.split()) == ("1", 4, ["NSpid:", "1"])


@pytest.mark.parametrize("limit", ["RLIMIT_NOFILE, (4, 4)", "RLIMIT_CPU, (0, 0)", "RLIMIT_AS, (1, 1)"])
def test_the_limits_of_another_process_stay(isolation, limit):
    async def body(sandbox):
        change = f"from resource import *; prlimit(1, {limit})"
        result = await sandbox.exec(f"{PYTHON} -c '{change}'")
        assert "not permitted" in result.stderr or "No such process" in result.stderr
        return (await sandbox.exec("ulimit -n 64 && ulimit -n")).stdout

    assert run(isolation, body) == "64\n"


def test_without_root_the_owner_is_out_of_reach_too(namespaces_work):
    """Commands, process 1 and the run's process have the same user there."""
    script = (
        "import os\n"
        "def state(pid):\n"
        "    limits = open(f'/proc/{pid}/limits').read()\n"
        "    return limits, os.getpriority(0, pid), os.sched_getaffinity(pid), os.sched_getscheduler(pid)\n"
        "async def main():\n"
        "    async with LocalSandbox() as sandbox:\n"
        "        pid = sandbox._process.pid\n"
        "        pids = [pid, *map(int, open(f'/proc/{pid}/task/{pid}/children').read().split())]\n"
        "        before = [state(each) for each in pids]\n"
        f"        await sandbox.write_file('attack.py', {ATTACKS!r})\n"
        f"        print((await sandbox.exec('exec {PYTHON} -I attack.py')).stdout.strip())\n"
        "        print(len(pids), before == [state(each) for each in pids])\n"
        "        print(sandbox.isolation, (await sandbox.exec('echo alive; nice')).stdout.split())\n"
    )
    lines = as_another_user(script).splitlines()
    if namespaces_work and lines[-1].startswith("namespaces"):
        assert lines == ["tried", "2 True", f"namespaces ['alive', '{os.nice(0)}']"]


def test_a_command_has_no_capabilities(namespaces_work):
    """Process 1 has some capabilities, because it watches processes that hide their descriptors."""
    script = (
        "async def main():\n"
        "    async with LocalSandbox() as sandbox:\n"
        "        result = await sandbox.exec('grep -E \"Cap(Prm|Eff|Amb)|NoNewPrivs|Seccomp:\" /proc/self/status')\n"
        "        print(sandbox.isolation, *result.stdout.split())\n"
    )
    none = [
        "CapPrm:",
        "0" * 16,
        "CapEff:",
        "0" * 16,
        "CapAmb:",
        "0" * 16,
        "NoNewPrivs:",
        "1",
        "Seccomp:",
        "2",
    ]
    if namespaces_work:
        result = run(
            "namespaces",
            lambda sandbox: sandbox.exec("grep -E 'Cap(Prm|Eff|Amb)|NoNew|Seccomp:' /proc/self/status"),
        )
        assert result.stdout.split() == none
        assert as_another_user(script).split() == ["namespaces", *none]
