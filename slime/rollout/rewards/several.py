"""This module combines several rewards of a sample (`--rm-type math,f1`) in a weighted sum.

The sum is the sample's reward. `Sample.metadata["reward_parts"]` stores the parts, and metrics are computed from them.
"""

from __future__ import annotations

import math
import numbers
import statistics
from collections.abc import Iterable, Mapping

import numpy as np

from slime.config.foreign_rewards import NOT_SCORED, PARTS
from slime.config.sections.reward import RewardConfig, part_name, reward_names
from slime.data.trajectories import trajectories
from slime.types import Reward, Sample

KEY = PARTS
"""Key in `Sample.metadata` for a dict that maps the name of every part to its reward without the weight."""


def add(flags: RewardConfig, sample: Sample, rewards: Mapping[str, Reward]) -> float:
    """Returns the weighted sum of the rewards, by their names in --rm-type. Stores the parts in the sample's metadata.

    A reward that does not apply to the response (`NOT_SCORED`) is no part of the sum.

    --rm-weights gives the weight of a name, also for names in a prompt's `rm_type`; the default is 1. Raises ValueError
    for a record without the entry --reward-key.
    """
    weights = dict(zip(reward_names(flags.rm_type), flags.rm_weights or (), strict=False))
    values = {name: _number(name, reward, flags.reward_key) for name, reward in rewards.items()}
    metadata = sample.metadata if isinstance(sample.metadata, dict) else {}
    parts = metadata.get(KEY, {}) | {part_name(name): value for name, value in values.items()}
    sample.metadata = {**metadata, KEY: parts}
    scored = {name: value for name, value in values.items() if value is not NOT_SCORED}
    if not scored:
        return NOT_SCORED
    return math.fsum(weights.get(name, 1.0) * value for name, value in scored.items())


def _number(name: str, reward: Reward, key: str | None) -> float:
    if not isinstance(reward, dict):
        return float(reward)
    if key not in reward:
        raise ValueError(
            f"--reward-key must name an entry of reward {name}, got {key!r}; choose one of {sorted(reward)}"
        )
    return float(reward[key])


def figures(samples: list[Sample]) -> dict[str, float]:
    """Returns reward/{part}, a part's mean over the trajectories that have the part. A part is one of several rewards,
    or a number in a reward that is a record. The result is empty for rewards that are plain numbers."""
    each: dict[str, list[float]] = {}
    for siblings in trajectories(samples):
        found: dict[str, list[float]] = {}
        for sample in siblings:
            for name, value in _parts(sample):
                found.setdefault(name, []).append(value)
        for name, values in found.items():
            each.setdefault(name, []).append(statistics.fmean(values))
    return {f"reward/{name}": statistics.fmean(values) for name, values in sorted(each.items())}


def _parts(sample: Sample) -> Iterable[tuple[str, float]]:
    """Yields the finite parts. A part that is not finite would make the metric of the whole rollout invalid."""
    parts: dict[str, object] = dict(sample.reward) if isinstance(sample.reward, dict) else {}
    if isinstance(sample.metadata, dict) and isinstance(own := sample.metadata.get(KEY), dict):
        parts |= own
    for name, value in parts.items():
        if isinstance(value, numbers.Real | np.bool_) and math.isfinite(value):
            yield str(name), float(value)
