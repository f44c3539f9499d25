"""The rewards `random` and `zero`, which read no answer: for baselines, and for runs that train without rewards."""

from __future__ import annotations

import hashlib

from slime.config.schema import Config
from slime.types import Sample


async def random_reward(c: Config, sample: Sample) -> float:
    """Returns a repeatable number, uniform in [0, 1): a hash of `--rollout-seed`, the sample's index and response."""
    digest = hashlib.sha256(f"{c.rollout.rollout_seed}:{sample.index}:{sample.response}".encode()).digest()
    return (int.from_bytes(digest[:8], "big") >> 11) / 2**53


async def zero_reward(c: Config, sample: Sample) -> float:
    """Returns 0.0."""
    return 0.0
