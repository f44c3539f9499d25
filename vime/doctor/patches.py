"""`vime doctor --patches`: the symbols of foreign programs that this project replaces, with the installed versions."""

from __future__ import annotations

from slime import bridges
from slime.bridges import Patch, datasets, megatron, processors, ray, torch
from vime.doctor.machine import installed_version
from vime.sglang import patches as sglang
from vime.vllm import patches as vllm

TABLES: dict[str, tuple[Patch, ...]] = {
    "vllm": tuple(patch for patches in vllm.PATCHES.values() for patch in patches),
    "sglang": sglang.PATCHES,
    "ray": ray.PATCHES,
    "megatron-core": megatron.PATCHES,
    "torch": torch.PATCHES,
    "datasets": datasets.PATCHES,
    "transformers": processors.PATCHES,
}
"""Records of each package's bridge."""


def lines() -> list[str]:
    """Returns a line with the installed version for each package, followed by lines with its records."""
    found: list[str] = []
    for package, patches in TABLES.items():
        version = installed_version(package) or installed_version(f"{package}-cpu")
        found.append(f"{package} {version or '(not installed)'}: {len(patches)} replaced")
        found += [f"  {line}" for line in bridges.table(patches).splitlines()]
    return found
