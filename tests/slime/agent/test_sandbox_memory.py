"""Tests memory and disk that belong to no process: each kind ends the sandbox, or the kernel rejects it.

A program that has no more descriptors waits with what it holds: memory of a program that ended by itself is free again.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys

import pytest
from sandbox_cases import PYTHON, as_another_user, command, run

from slime.agent.init.memory_group import MemoryGroup
from slime.agent.sandbox import Limits

LIMITS = Limits(memory_bytes=64 << 20, disk_bytes=32 << 20, address_space_bytes=None)
FORKS = "import os, socket, time\nfor _ in range(3):\n    if os.fork() == 0: break\nkept = []\n"
FILLS = """
    kept += ends
    for end in ends:
        end.setblocking(False)
        try:
            while True: end.send(bytes(1 << 16))
        except OSError: pass
"""
ENDED = {
    "unix sockets": (
        f"{FORKS}while True:\n    try: ends = socket.socketpair()\n    except OSError: time.sleep(30){FILLS}",
        "memory",
    ),
    "unix sockets of a process that hides them": (
        f"import ctypes\nctypes.CDLL(None).prctl(4, 0, 0, 0, 0)\n{FORKS}while True:\n"
        f"    try: ends = socket.socketpair()\n    except OSError: time.sleep(30){FILLS}",
        "memory",
    ),
    "tcp": (
        f"{FORKS}server = socket.create_server(('127.0.0.1', 0), backlog=64)\nwhile True:\n"
        "    try:\n        first = socket.create_connection(server.getsockname())\n"
        f"        ends = [first, server.accept()[0]]\n    except OSError: time.sleep(30){FILLS}",
        "memory",
    ),
    "udp": (
        f"{FORKS}while True:\n    try: one = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\n"
        "    except OSError: time.sleep(30)\n    one.bind(('127.0.0.1', 0))\n"
        "    one.connect(one.getsockname())\n    kept += [one]\n    for _ in range(6): one.send(bytes(50000))\n",
        "memory",
    ),
    "pipes": (
        f"{FORKS}while True:\n    try: ends = os.pipe()\n    except OSError: time.sleep(30)\n"
        "    kept += ends\n    os.set_blocking(ends[1], False)\n    os.write(ends[1], bytes(1 << 16))\n",
        "memory",
    ),
    "page tables": (
        "import mmap\nkept = []\nwhile True:\n    kept.append(mmap.mmap(-1, 1 << 30))\n"
        "    for place in range(0, 1 << 30, 1 << 21): kept[-1][place]\n",
        "memory",
    ),
    "deleted files": (
        "import os, time\nfor _ in range(64):\n    file = os.open('file', os.O_CREAT | os.O_RDWR)\n"
        "    os.unlink('file')\n"
        "    os.write(file, bytes(1 << 20))\ntime.sleep(30)\n",
        "disk",
    ),
    "deleted files that are mapped": (
        "import mmap, os, time\nkept = []\nfor _ in range(64):\n    file = os.open('file', os.O_CREAT | os.O_RDWR)\n"
        "    os.unlink('file')\n    os.write(file, bytes(1 << 20))\n    kept.append(mmap.mmap(file, 1 << 20))\n"
        "    os.close(file)\ntime.sleep(30)\n",
        "disk",
    ),
}
LONG = ("unix sockets of a process that hides them", "pipes", "page tables", "deleted files that are mapped")
REFUSED = {
    "a file in memory": "import os; os.memfd_create('x')",
    "shared memory of System V": "if libc.shmget(0, 1 << 20, 0o1600) < 0: raise OSError",
    "a message queue": "if libc.msgget(0, 0o1600) < 0: raise OSError",
    "semaphores": "if libc.semget(0, 100, 0o1600) < 0: raise OSError",
    "io_uring": "if libc.syscall(425, 8, 0) < 0: raise OSError",
    "userfaultfd": "if libc.syscall(323, 1) < 0: raise OSError",
    "the key ring": "if libc.syscall(248, b'user', b'x', b'y', 1, -3) < 0: raise OSError",
    "a user namespace": "if libc.unshare(0x10000000) < 0: raise OSError",
    "another family": "import socket; socket.socket(socket.AF_ALG, socket.SOCK_SEQPACKET)",
    "a larger pipe": "import fcntl, os; fcntl.fcntl(os.pipe()[0], 1031, 1 << 20)",
    "its input": "import os; os.write(os.open('/proc/self/fd/0', os.O_RDWR), b'x')",
}


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.slow if kind in LONG else ()) for kind in ENDED]
)
def test_memory_that_no_process_shows_counts(isolation, kind):
    program, reason = ENDED[kind]
    assert command(isolation, f'exec {PYTHON} -c "{program}"', limits=LIMITS).reason == reason


@pytest.mark.slow
def test_without_root_it_counts_too():
    """Without root, no cgroup is available."""
    script = (
        f"programs = {ENDED!r}\n"
        "async def one(kind):\n"
        "    limits = Limits(memory_bytes=64 << 20, disk_bytes=32 << 20, address_space_bytes=None)\n"
        "    async with LocalSandbox(limits=limits) as sandbox:\n"
        "        await sandbox.write_file('fill.py', programs[kind][0])\n"
        f"        return (await sandbox.exec('exec {PYTHON} fill.py', timeout=30)).reason\n"
        "async def main():\n"
        "    reasons = await asyncio.gather(*map(one, programs))\n"
        "    for kind, reason in zip(programs, reasons): print(kind, reason, sep=': ')\n"
    )
    assert as_another_user(script).splitlines() == [f"{kind}: {why}" for kind, (_, why) in ENDED.items()]


def test_only_the_groups_of_ended_runs_are_removed():
    """A run in another container makes a group, and does not see the first run in its /proc."""
    make = "from slime.agent.init.memory_group import MemoryGroup; group = MemoryGroup.make(1 << 26)"
    make += "; print(group and group.folder, flush=True)"
    code = [sys.executable, "-c", f"{make}; input()"]
    first = subprocess.Popen(code, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    folder = first.stdout.readline().strip()
    try:
        if folder == "None":
            pytest.skip("this host allows no memory group")
        container = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc"]
        other = subprocess.run(
            [*container, sys.executable, "-c", f"{make}; group.remove()"], capture_output=True, text=True
        )
        if other.returncode and "unshare" in other.stderr:
            pytest.skip(other.stderr)
        assert other.returncode == 0, other.stderr
        assert os.path.isdir(folder)
    finally:
        first.kill()
        first.communicate()
    MemoryGroup.make(1 << 26).remove()
    assert not os.path.exists(folder)


def test_the_kernel_refuses_what_nothing_counts(isolation):
    async def body(sandbox):
        for kind, code in REFUSED.items():
            await sandbox.write_file("call.py", f"import ctypes\nlibc = ctypes.CDLL(None)\n{code}\n")
            result = await sandbox.exec(f"{PYTHON} call.py", stdin="x")
            assert "Error" in result.stderr, kind

    run(isolation, body, limits=LIMITS)


def test_a_process_cannot_hide_its_descriptors(isolation):
    """The watch counts what they hold, and without root it may not look into a process that is not dumpable."""
    code = (
        "import ctypes; libc = ctypes.CDLL(None); print(libc.prctl(4, 0, 0, 0, 0), libc.prctl(3, 0, 0, 0, 0))"
    )
    assert command(isolation, f"{PYTHON} -c '{code}'").stdout == "0 1\n"


def test_what_programs_need_still_works(isolation):
    code = (
        "import asyncio, multiprocessing, resource, socket, subprocess, tempfile, threading\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))\n"
        "thread = threading.Thread(target=print, args=['thread']); thread.start(); thread.join()\n"
        "print(subprocess.run(['echo', 'child'], capture_output=True, text=True).stdout.strip())\n"
        "async def main():\n"
        "    server = await asyncio.start_server(lambda r, w: w.close(), '127.0.0.1', 0)\n"
        "    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())\n"
        "    print(await reader.read()); writer.close()\n"
        "asyncio.run(main())\n"
        "if __name__ == '__main__':\n"
        "    with multiprocessing.Pool(2) as pool: print(pool.map(abs, [-1, 2]))\n"
        "    a, b = socket.socketpair(); a.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 22); a.send(b'x')\n"
        "    with tempfile.TemporaryFile() as file: print(file.write(b'x' * 1000))\n"
    )

    async def body(sandbox):
        await sandbox.write_file("uses.py", code)
        result = await sandbox.exec(f"{PYTHON} uses.py")
        assert result.stdout.split() == ["thread", "child", "b''", "[1,", "2]", "1000"], result.stderr
        # Idle connections and small temporary files do not count as memory.
        await asyncio.sleep(0.3)
        return result.reason

    assert run(isolation, body, limits=LIMITS) == ""
