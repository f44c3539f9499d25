"""Packages that are not installed: the line that names them, and the command that installs them.

Imports the standard library only: the `vime` command needs this module where nothing else is installed.
"""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path

IS_CHECKOUT = (Path(__file__).resolve().parents[2] / "scripts" / "setup.sh").is_file()
"""Whether this code runs from its repository, which has scripts and examples. A wheel has none."""
_OWN = ("rl_kernel", "slime", "vime")
_DISTRIBUTIONS = {"megatron": "megatron-core", "yaml": "pyyaml"}
"""Module -> the package that pip installs, where the names differ by more than - and _."""


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
