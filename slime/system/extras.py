"""Writes the error for a package that is not installed, with the command that installs it.

This module imports the standard library only, because the `vime` command also needs it if no package is installed.
"""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path

IS_CHECKOUT = (Path(__file__).resolve().parents[2] / "scripts" / "setup.sh").is_file()
"""True if this code runs from its repository, which has scripts and examples. A wheel does not contain them."""
_OWN = ("rl_kernel", "slime", "vime")
_DISTRIBUTIONS = {"megatron": "megatron-core", "yaml": "pyyaml"}
"""Module -> name of its package for pip. The dict has the names that differ by more than - and _."""


def install(extra: str | None = None) -> str:
    """Returns the command that installs the packages of `extra`, which is cpu or gpu. The default is the extra that
    fits this machine."""
    extra = extra or ("gpu" if shutil.which("nvidia-smi") else "cpu")
    if IS_CHECKOUT:
        return f"pip install '.[{extra}]' in the folder of vime, or bash scripts/setup.sh"
    return f"pip install 'vime[{extra}]'"


def missing(error: ModuleNotFoundError, who: str) -> str | None:
    """Returns the message for `who`, a command that could not import a package. Returns None if the error has another
    cause: a module of this project is missing, or an installed package lacks a part."""
    top, _, rest = (error.name or "").partition(".")
    if not top or top in _OWN or (rest and _is_there(top)):
        return None
    package = _DISTRIBUTIONS.get(top, top.removesuffix("_rs").replace("_", "-"))
    return f"{who} must have the package {package}, got none installed; install the extra: {install()}"


def _is_there(top: str) -> bool:
    return importlib.util.find_spec(top) is not None
