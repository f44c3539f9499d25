"""Removes what a closed sandbox left on the host: processes without their owner, files in public folders."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path

MARKER = "VIME_SANDBOX"
"""The variable with the sandbox's name in the environment of its commands."""


def sweep(sandbox_id: str) -> None:
    """Kill processes that lost their owner. Only code that kills the owner and clears its own environment stays."""
    marker = f"{MARKER}={sandbox_id}".encode()
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        found = [int(name) for name in os.listdir("/proc") if name.isdigit() and marker in _environ(name)]
        for pid in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if not found:
            return
        time.sleep(0.01)


def _environ(pid: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return b""


def delete_of_user(user: int) -> None:
    """What a sandbox without namespaces left in the host's public folders."""
    for place in ("/tmp", "/var/tmp", "/dev/shm"):
        with contextlib.suppress(FileNotFoundError):
            for entry in list(os.scandir(place)):
                with contextlib.suppress(FileNotFoundError):
                    if entry.stat(follow_symlinks=False).st_uid == user:
                        delete(entry.path)


def delete(folder: str) -> None:
    """rm, because trees deeper than Python's recursion limit are among what is deleted."""
    if os.getuid():
        subprocess.run(["chmod", "-R", "u+rwX", "--", folder], stderr=subprocess.DEVNULL, check=False)
    subprocess.run(["rm", "-rf", "--", folder], check=False)
