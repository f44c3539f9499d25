"""The code, the packages and the flags of a run, as digests in its receipt."""

from __future__ import annotations

import hashlib
import importlib.util
import platform
from pathlib import Path

from rl_kernel.host import git_state
from slime.tracking.environment import installed_packages

PACKAGES = ("rl_kernel", "slime", "vime")


def describe_origin(run_dir: Path) -> dict[str, object]:
    """Returns commit, digests of this project's packages, versions of all packages, and the digest of config.json."""
    root = Path(__file__).resolve().parents[2]
    return {
        "git": git_state(root),
        "code": {name: digest_package(name) for name in PACKAGES},
        "python": platform.python_version(),
        "packages": installed_packages(),
        "flags": digest_flags(run_dir),
    }


def digest_package(name: str) -> str:
    """Returns the SHA-256 over the names and the content of a package's Python files."""
    spec = importlib.util.find_spec(name)
    assert spec is not None and spec.origin is not None
    folder, found = Path(spec.origin).parent, hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        found.update(f"{path.relative_to(folder)}\0".encode())
        found.update(hashlib.sha256(path.read_bytes()).digest())
    return found.hexdigest()


def digest_flags(run_dir: Path) -> str:
    """Returns the SHA-256 of config.json, the run's flags without secrets."""
    return hashlib.sha256((run_dir / "config.json").read_bytes()).hexdigest()
