"""Makes copies of the repository in which documented commands run with the environment of the tests."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def use_this_environment(folder: Path) -> None:
    """Replaces scripts/setup.sh by a script that does nothing, because .venv is the environment of this process."""
    (folder / "scripts/setup.sh").write_text("#!/usr/bin/env bash\nset -euo pipefail\n")
    (folder / ".venv").symlink_to(sys.prefix)


def linked_checkout(folder: Path) -> Path:
    """Makes a folder with links to the files of the repository and its own runs/."""
    for path in ROOT.iterdir():
        if path.name not in (".git", ".venv", "scripts", "runs", "build"):
            (folder / path.name).symlink_to(path)
    shutil.copytree(ROOT / "scripts", folder / "scripts", ignore=shutil.ignore_patterns("__pycache__"))
    use_this_environment(folder)
    return folder


def in_shell(command: str, folder: Path) -> str:
    """Runs the command in `folder` as a user does and returns its standard output. The command must succeed."""
    path = f"{Path(sys.prefix) / 'bin'}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", command],
        cwd=folder,
        env={**os.environ, "PATH": path, "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout
