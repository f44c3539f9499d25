"""Packages that only some flags need: missed here, and not when their first use comes, after the models were loaded.

Looks for a package without importing it. Transformer Engine is left to the trainers: to be there does not say that it
fits their torch, and only an import tells.
"""

from __future__ import annotations

import importlib.util
from typing import Any

_COMPARED_AS_MATHEMATICS = ("math", "deepscaler", "dapo")


def check_packages(c: Any) -> None:
    """ValueError that names the flag, the package it needs and the command that installs it."""
    needed = []
    if c.use_tensorboard:
        needed.append(("--use-tensorboard", "tensorboard", "tensorboard"))
    if c.use_wandb:
        needed.append(("--use-wandb", "wandb", "wandb"))
    if c.custom_rm_path is None and (c.rm_type or "").removeprefix("boxed_") in _COMPARED_AS_MATHEMATICS:
        needed.append((f"--rm-type {c.rm_type}", "math_verify", "math-verify"))
    for flag, module, package in needed:
        if not _is_installed(module):
            raise ValueError(
                f"{flag} must have the package {package}, got none installed; pip install {package}, or leave the "
                "flag out"
            )


def _is_installed(module: str) -> bool:
    """Whether `import module` would find a package: a folder of that name that only holds files is none, and wandb
    leaves one where it has run."""
    spec = importlib.util.find_spec(module)
    return spec is not None and spec.origin is not None
