"""Decides whether fla-core's kernels can train gated delta nets. Imports no torch: `vime doctor` needs this module."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from packaging.version import Version

PACKAGE = "fla-core"
HOPPER = 9
"""Major compute capability of Hopper GPUs."""
REFUSED_TRITON = Version("3.4.0"), Version("3.7.1")
"""First Triton and first fixed Triton: between them, the gradients of fla-core's kernels are wrong on Hopper, and
fla-core 0.6 raises an error in the backward (fla.ops.common.chunk_o)."""


def obstacle(installed: str | None, triton: str | None, *, hopper: bool) -> str | None:
    """Returns why the kernels cannot train on this host, or None. `installed` and `triton` are versions."""
    reasons = []
    if installed is None:
        reasons.append(f"{PACKAGE} is not installed")
    first, fixed = REFUSED_TRITON
    if hopper and triton is not None and first <= Version(triton) < fixed:
        reasons.append(f"{PACKAGE} refuses Triton {triton} on Hopper GPUs (from {first}, below {fixed})")
    return " and ".join(reasons) or None


def local_obstacle(*, hopper: bool) -> str | None:
    """Returns `obstacle` for the packages of this process."""
    return obstacle(_version(PACKAGE), _version("triton"), hopper=hopper)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def remedy() -> str:
    return (
        f"for faster training of Qwen3-Next and Qwen3.5: pip install {PACKAGE}, and on Hopper a torch with Triton "
        f"{REFUSED_TRITON[1]} or newer; other models do not need it"
    )
