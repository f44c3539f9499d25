"""Facts about this machine from git, nvidia-smi and other commands. Starts no CUDA context; unknown facts are None."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

TIMEOUT_S = 10
_PASSED = ("PATH", "HOME", "XDG_CONFIG_HOME", "LANG", "LC_ALL", "LD_LIBRARY_PATH")
"""Environment variables that git and nvidia-smi receive. Keys and tokens are not among them."""
Facts = dict[str, Any]
"""A JSON object of facts about a machine."""


def command_output(*command: str) -> str | None:
    """Returns the output of a command, or None if the command is not installed, fails, or takes too long."""
    if shutil.which(command[0]) is None:
        return None
    environ = {name: os.environ[name] for name in _PASSED if name in os.environ}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=TIMEOUT_S, check=True, env=environ
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def git_state(root: Path) -> Facts | None:
    """Returns the commit, whether tracked files differ from the commit, and the SHA-256 of the diff. Returns None
    unless `root` is the top of a checkout."""
    top = command_output("git", "-C", str(root), "rev-parse", "--show-toplevel")
    if top is None or Path(top).resolve() != root:  # the package is installed inside another repository
        return None
    commit = command_output("git", "-C", str(root), "rev-parse", "--verify", "--quiet", "HEAD")
    if commit is None:
        return None
    changes = command_output("git", "-C", str(root), "status", "--porcelain", "--untracked-files=no")
    found: Facts = {"commit": commit, "modified": None if changes is None else bool(changes)}
    if changes:
        difference = command_output("git", "-C", str(root), "diff", "HEAD") or ""
        found["difference"] = hashlib.sha256(difference.encode()).hexdigest()
    return found


def gpu_rows(facts: Sequence[str], *, units: bool = False) -> list[list[str]] | None:
    """Returns the facts per GPU as nvidia-smi prints them, or None if nvidia-smi is missing or fails."""
    form = "csv,noheader" if units else "csv,noheader,nounits"
    listing = command_output("nvidia-smi", f"--query-gpu={','.join(facts)}", f"--format={form}")
    if listing is None:
        return None
    return [[part.strip() for part in line.split(",")] for line in listing.splitlines() if line]
