"""`vime --version`: prints the version, the commit, and the versions of the packages that affect a run.

The commit comes from the checkout, or from the file that setup.py wrote into an installed wheel.
"""

from __future__ import annotations

import platform
from pathlib import Path

from rl_kernel.host import git_state
from slime.tracking.environment import installed_packages
from vime.doctor.packages import STACK

PACKAGE = Path(__file__).resolve().parents[1]
COMMIT_FILE = "COMMIT"


def commit(package: Path = PACKAGE) -> str:
    """Returns the commit of the package in the directory `package`, as text to print."""
    if (state := git_state(package.parent)) is not None:
        return f"{state['commit']}{' (with local changes)' if state['modified'] else ''}"
    recorded = package / COMMIT_FILE
    return recorded.read_text(encoding="utf-8").strip() if recorded.is_file() else "unknown"


def version_lines() -> list[str]:
    """Returns one line per fact, with the name first."""
    installed = {name.lower(): version for name, version in installed_packages().items()}
    facts = {
        "vime": installed.get("vime", "not installed"),
        "commit": commit(),
        "python": platform.python_version(),
    }
    for package, names in STACK.items():
        present = [name for name in names if name in installed]
        label = present[0] if present else package
        facts[label] = installed[label] if present else "not installed"
    width = max(map(len, facts))
    return [f"{name:<{width}}  {value}" for name, value in facts.items()]
