"""The `zero` reward is 0 for every sample. It serves runs that train without rewards, such as with a teacher."""

from __future__ import annotations

from slime.config.schema import Config
from slime.types import Sample


async def zero_reward(c: Config, sample: Sample) -> float:
    """Returns 0.0."""
    return 0.0
