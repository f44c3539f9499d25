"""The record of machine and versions that every result has."""

from __future__ import annotations

import datetime
import importlib.metadata
import platform
from collections.abc import Sequence
from pathlib import Path

import torch

from rl_kernel.host import Facts, git_state, gpu_rows

REPOSITORY = Path(__file__).resolve().parents[2]
GPU_FACTS = ("driver_version", "clocks.max.sm", "power.limit", "clocks.sm", "power.draw", "temperature.gpu")
PACKAGES = ("triton", "liger-kernel", "cut-cross-entropy")


def describe(device: torch.device, command: Sequence[str], commit: str | None = None) -> Facts:
    """Returns plain data: GPU, driver, versions, commit (and whether files differ from it), command line, date.

    `command` has the arguments of `python`: the script, or -m and the module, and its arguments. `commit` is for
    machines that have a copy of the files without their history. Arguments keep file names only, without folders.
    """
    state = git_state(REPOSITORY) or {}
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": " ".join(["python", *(word.rpartition("/")[2] for word in command)]),
        "commit": commit or state.get("commit"),
        "dirty": None if commit else state.get("modified"),
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        "gpu_facts": gpu_facts() if device.type == "cuda" else {},
        "cpu": platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        **{name: _version(name) for name in PACKAGES},
    }


def gpu_facts() -> dict[str, str]:
    """Returns driver, clocks, power and temperature from nvidia-smi; empty if nvidia-smi does not run."""
    values = (gpu_rows(GPU_FACTS, units=True) or [[]])[0]
    return dict(zip(GPU_FACTS, values, strict=True)) if len(values) == len(GPU_FACTS) else {}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
