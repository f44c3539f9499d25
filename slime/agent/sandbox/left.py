"""Removes the remains of a closed sandbox from the host: processes without an owner, and files in public folders."""

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
    """Kills the sandbox's processes that have lost their owner. Only a program that kills the owner and clears its
    environment survives."""
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


def delete_user_files(user: int) -> None:
    """Deletes the files of a user, those of a sandbox without namespaces, from the host's public folders."""
    for folder in ("/tmp", "/var/tmp", "/dev/shm"):
        with contextlib.suppress(FileNotFoundError):
            for entry in list(os.scandir(folder)):
                with contextlib.suppress(FileNotFoundError):
                    if entry.stat(follow_symlinks=False).st_uid == user:
                        delete(entry.path)


def delete(folder: str) -> None:
    """Deletes a folder with `rm`, because its tree may be deeper than Python's recursion limit."""
    if os.getuid():
        subprocess.run(["chmod", "-R", "u+rwX", "--", folder], stderr=subprocess.DEVNULL, check=False)
    subprocess.run(["rm", "-rf", "--", folder], check=False)
