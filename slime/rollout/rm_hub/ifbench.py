"""Import path of slime plug-ins for IFBench, whose checks are in a separate package."""

from __future__ import annotations

from typing import NoReturn

from slime.types import Metadata


def compute_ifbench_reward(response: str, label: object, metadata: Metadata | None = None) -> NoReturn:
    """Raises ValueError, because the checks of IFBench are not part of this project."""
    raise ValueError(
        "--rm-type must not be ifbench, got it; its checks of instructions are not part of this project: call the "
        "ifbench package in a --custom-rm-path"
    )
