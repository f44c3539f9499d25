"""Checks for the functions that a run calls, and a real engine and trainer on a tiny model, for the tests of users.

    from vime.testing import check_reward

    def test_reward():
        check_reward(reward, [Sample(response="It is 42", label="42")], expected=[1.0])

`pip install vime[test]` brings pytest, which finds the fixtures of `vime.testing.plugin`. A check raises AssertionError
with the first rule that the function broke.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vime.testing.families import check_family as check_family
    from vime.testing.filters import check_filter as check_filter
    from vime.testing.generation import check_agent as check_agent
    from vime.testing.generation import check_generate as check_generate
    from vime.testing.losses import check_loss as check_loss
    from vime.testing.rewards import check_reward as check_reward

_HOMES = {
    "check_agent": "generation",
    "check_family": "families",
    "check_filter": "filters",
    "check_generate": "generation",
    "check_loss": "losses",
    "check_reward": "rewards",
}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> object:
    """Imports a check when it is first used, because pytest imports this package at each start."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
