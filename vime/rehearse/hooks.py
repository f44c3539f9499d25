"""The filter of a rehearsal: it calls the user's filter, after it has made the rewards of an untrained group differ."""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Sequence

from slime.hooks import load_function
from slime.types import Sample

FILTER = "vime.rehearse.hooks.keep_spread_group"
USERS = "VIME_REHEARSE_FILTER"
"""Variable with the path of the user's own filter, or an empty text."""


def keep_spread_group(flags: Namespace, samples: Sequence[Sample | list[Sample]], **kwargs: object) -> object:
    """Gives every second sample of a group with equal rewards one point more, and asks the user's filter.

    A random model rarely earns a reward. With equal rewards, all advantages are 0, and nothing would be trained.
    """
    firsts = [sample[0] if isinstance(sample, list) else sample for sample in samples]
    key = getattr(flags, "reward_key", None)
    rewards = [
        sample.reward[key] if key and isinstance(sample.reward, dict) else sample.reward for sample in firsts
    ]
    if len(set(map(repr, rewards))) == 1 and isinstance(rewards[0], int | float):
        for sample in samples:
            for part in sample if isinstance(sample, list) else [sample]:
                if firsts.index(sample[0] if isinstance(sample, list) else sample) % 2:
                    _raise_reward(part, key)
    if not (path := os.environ.get(USERS)):
        return True
    return load_function(path, "--dynamic-sampling-filter-path")(flags, samples, **kwargs)


def _raise_reward(sample: Sample, key: str | None) -> None:
    if key and isinstance(sample.reward, dict):
        sample.reward[key] += 1.0
    else:
        sample.reward = float(sample.reward) + 1.0  # type: ignore[arg-type]  # a number, see the caller
