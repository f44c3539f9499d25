"""The built-in dynamic-sampling filters (DAPO, 2503.14476, section 3.2)."""

from __future__ import annotations

import statistics
from typing import Any

from slime.rollout.filter_hub.base_types import DynamicFilterOutput
from slime.types import Sample


def check_reward_nonzero_std(args: Any, samples: list[Sample], **kwargs: Any) -> DynamicFilterOutput:
    """Drop a group whose rewards are all the same: its advantages are 0 and teach nothing.

    Keeps when `rewards.std() > 1e-6` (unbiased); a group of one sample has no deviation and is dropped. The
    reason is zero_std_{reward}, to one decimal, so that too easy and too hard prompts are counted apart.
    """
    rewards = [sample.get_reward_value(args) for sample in samples]
    if len(rewards) > 1 and statistics.stdev(rewards) > 1e-6:
        return DynamicFilterOutput(keep=True)
    return DynamicFilterOutput(keep=False, reason=f"zero_std_{round(rewards[0], 1)}")


def check_reward_nonzero_std_with_fallback(
    args: Any, samples: list[Sample], **kwargs: Any
) -> DynamicFilterOutput:
    """`check_reward_nonzero_std`, but a group without deviation is better than drawing more prompts."""
    output = check_reward_nonzero_std(args, samples, **kwargs)
    output.keep_when_insufficient = True
    return output
