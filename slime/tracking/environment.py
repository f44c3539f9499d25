"""Writes environment.json next to the metrics: a run's machine, code and files.

Starts no CUDA context: GPU facts come from nvidia-smi. It never fails a run: values that cannot be found are null.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
import re
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

from rl_kernel.host import git_state, gpu_rows
from slime.config.secrets import MASK, is_secret, mask_command, mask_secrets, without

ENVIRONMENT_FILE = "environment.json"
_ENV_PREFIXES = (
    "VIME_",
    "RL_KERNEL_",
    "VLLM_",
    "NCCL_",
    "GLOO_",
    "RAY_",
    "CUDA_",
    "PYTORCH_",
    "TORCH_",
    "TRITON_",
    "OMP_",
    "HF_",
)
_ENV_NAMES = (
    "LD_LIBRARY_PATH",
    "LD_PRELOAD",
    "PYTHONPATH",
    "PYTHONHASHSEED",
    "WANDB_MODE",
    "TOKENIZERS_PARALLELISM",
)


def collect_environment(
    argv: Sequence[str], environ: Mapping[str, str], files: Sequence[str | Path] = ()
) -> dict[str, object]:
    """Collects facts as JSON values: time, command line, checkout, Python, packages, host, CPUs, GPUs, variables, and
    size and SHA-256 of the existing files in `files`.

    The value of a secret variable in `environ` is masked everywhere, even under another name.
    """
    variables = {
        name: MASK if is_secret(name) else value
        for name, value in sorted(environ.items())
        if name.startswith(_ENV_PREFIXES) or name in _ENV_NAMES
    }
    facts = {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": mask_command(argv),
        "directory": os.getcwd(),
        "git": git_state(Path(__file__).resolve().parents[2]),
        "python": {"version": platform.python_version(), "executable": sys.executable},
        "packages": installed_packages(),
        "host": {"name": platform.node(), "platform": platform.platform()},
        "cpu": _cpu(),
        "gpus": _gpus(),
        "variables": mask_secrets(variables),
        "files": mask_secrets({str(path): _digest(Path(path)) for path in files if Path(path).is_file()}),
    }
    secrets = [value for name, value in environ.items() if is_secret(name) and len(value) >= 8]
    return {name: without(value, secrets) for name, value in facts.items()}


def write_environment(
    run_dir: Path,
    argv: Sequence[str],
    environ: Mapping[str, str] | None = None,
    files: Sequence[str | Path] = (),
) -> Path:
    """Writes `run_dir`/environment.json and returns its path. An existing file is renamed to environment.N.json."""
    path = Path(run_dir) / ENVIRONMENT_FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
        count = len(list(path.parent.glob("environment.*.json")))
        path.rename(path.with_name(f"environment.{count + 1}.json"))
    facts = collect_environment(argv, os.environ if environ is None else environ, files)
    path.write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    return path


def _digest(path: Path) -> dict[str, object]:
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def installed_packages() -> dict[str, str]:
    """Maps distribution to version for every package that this environment can import."""
    # setuptools and Ray add their bundled packages to sys.path; these do not belong to this environment
    paths = [path for path in sys.path if not _is_in_a_package(Path(path))]
    distributions = [d for d in importlib.metadata.distributions(path=paths) if d.metadata["Name"]]
    found = {
        d.metadata["Name"]: d.version for d in reversed(distributions)
    }  # Python imports the first entry on the path
    return dict(sorted(found.items(), key=lambda item: item[0].lower()))


def _is_in_a_package(path: Path) -> bool:
    """Returns True if an entry of sys.path is inside a package of another entry."""
    inner = (
        path.relative_to(base) for base in map(Path, sys.path) if path != base and path.is_relative_to(base)
    )
    return any(
        (path.parents[len(part.parts) - 1] / part.parts[0] / "__init__.py").is_file() for part in inner
    )


def _cpu() -> dict[str, object]:
    model = memory = None
    cpuinfo, meminfo = Path("/proc/cpuinfo"), Path("/proc/meminfo")
    if cpuinfo.exists():
        found = re.search(r"^model name\s*:\s*(.+)$", cpuinfo.read_text(encoding="utf-8"), re.MULTILINE)
        model = found.group(1) if found else None
    if meminfo.exists():
        found = re.search(r"^MemTotal:\s*(\d+) kB$", meminfo.read_text(encoding="utf-8"), re.MULTILINE)
        memory = int(found.group(1)) * 1024 if found else None
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "model": model or platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "usable_cores": usable,
        "memory_bytes": memory,
    }


def _gpus() -> list[dict[str, object]] | None:
    """Returns one record per GPU, or None if nvidia-smi is missing or fails."""
    rows = gpu_rows(("name", "driver_version", "memory.total"))
    if rows is None:
        return None
    return [{"name": name, "driver": driver, "memory_mib": memory} for name, driver, memory in rows]
