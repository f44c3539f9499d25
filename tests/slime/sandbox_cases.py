"""Runs commands in a local sandbox, and finds the processes and folders that are left afterwards."""

from __future__ import annotations

import asyncio
import functools
import os
import subprocess
import sys
from pathlib import Path

from slime.agent.sandbox import Limits, LocalSandbox

SMALL = Limits(
    memory_bytes=256 << 20,
    address_space_bytes=None,
    processes=64,
    disk_bytes=16 << 20,
    files=500,
    output_bytes=100_000,
)
PYTHON = "/usr/bin/python3"
DAEMON = "setsid bash -c 'setsid bash -c \"exec -a {name} sleep 1000\" &' >/dev/null 2>&1 </dev/null &"


@functools.cache
def namespaces_work():
    """Returns whether this host allows namespaces to a sandbox."""

    async def probe():
        async with LocalSandbox() as sandbox:
            return sandbox.isolation == "namespaces"

    return asyncio.run(probe())


def run(isolation, body, **settings):
    """Runs `body(sandbox)` in a sandbox, and checks that it leaves no process and no folder."""

    async def main():
        sandbox = LocalSandbox(isolation=isolation, **{"limits": SMALL, **settings})
        async with sandbox:
            folder = sandbox.folder
            result = await body(sandbox)
        assert not os.path.exists(folder)
        assert not left_behind(sandbox.sandbox_id)
        return result

    return asyncio.run(main())


def command(isolation, text, timeout=20, **settings):
    return run(isolation, lambda sandbox: sandbox.exec(text, timeout=timeout), **settings)


def left_behind(marker):
    """Returns the processes whose environment or command line has the marker."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        for file in ("environ", "cmdline"):
            try:
                if marker.encode() in Path(f"/proc/{name}/{file}").read_bytes():
                    found.append(int(name))
            except OSError:
                continue
    return found


def titled(name):
    """Returns the number of processes whose command line starts with the name."""
    found = 0
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            found += Path(f"/proc/{pid}/cmdline").read_bytes().startswith(name.encode() + b"\0")
        except OSError:
            continue
    return found


def as_another_user(script):
    """Runs `main()` of the script as a user who is not root, and returns the output."""
    start = "import asyncio\nfrom slime.agent.sandbox import *\n"
    user = {"user": 54321, "group": 54321, "extra_groups": []} if os.getuid() == 0 else {}
    result = subprocess.run(
        [PYTHON if user else sys.executable, "-c", f"{start}{script}asyncio.run(main())\n"],
        capture_output=True,
        text=True,
        timeout=100,
        cwd="/",
        env={"PYTHONPATH": str(Path(__file__).parents[2]), "PATH": os.environ["PATH"]},
        **user,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout
