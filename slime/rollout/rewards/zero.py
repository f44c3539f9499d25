"""The `zero` reward: 0 for every sample, where something else trains the policy, such as a teacher."""

from __future__ import annotations

from slime.config.schema import Config
from slime.types import Sample


async def zero_reward(c: Config, sample: Sample) -> float:
    """0.0."""
    return 0.0
