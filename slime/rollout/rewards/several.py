"""Several rewards of one sample (`--rm-type math,f1`): their weighted sum, the parts, and the metrics of parts.

The sum is the sample's reward. The parts are in `Sample.metadata["reward_parts"]`, from which metrics are made.
"""

from __future__ import annotations

import math
import numbers
import statistics
from collections.abc import Iterable, Mapping

import numpy as np

from slime.config.sections.reward import RewardConfig, part_name, reward_names
from slime.data.trajectories import trajectories
from slime.types import Reward, Sample

KEY = "reward_parts"
"""In `Sample.metadata`: the name of each part -> its reward without its weight."""


def add(flags: RewardConfig, sample: Sample, rewards: Mapping[str, Reward]) -> float:
    """The weighted sum of the rewards, by their names in --rm-type. Keeps the parts in the sample's metadata.

    The weight of a name is that of --rm-weights, also where a prompt's own rm_type names the reward; otherwise 1.
    ValueError for a record without the entry --reward-key.
    """
    weights = dict(zip(reward_names(flags.rm_type), flags.rm_weights or (), strict=False))
    values = {name: _number(name, reward, flags.reward_key) for name, reward in rewards.items()}
    metadata = sample.metadata if isinstance(sample.metadata, dict) else {}
    sample.metadata = {**metadata, KEY: {part_name(name): value for name, value in values.items()}}
    return math.fsum(weights.get(name, 1.0) * value for name, value in values.items())


def _number(name: str, reward: Reward, key: str | None) -> float:
    if not isinstance(reward, dict):
        return float(reward)
    if key not in reward:
        raise ValueError(
            f"--reward-key must name an entry of reward {name}, got {key!r}; choose one of {sorted(reward)}"
        )
    return float(reward[key])


def figures(samples: list[Sample]) -> dict[str, float]:
    """reward/{part}: the mean of each part of the rewards, over the trajectories that have it. A part is a reward of
    several, or a number in a reward that is a record. Empty for rewards that are plain numbers."""
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
    """The finite numbers. The metric of one that is not finite would be none for the whole rollout."""
    parts: dict[str, object] = dict(sample.reward) if isinstance(sample.reward, dict) else {}
    if isinstance(sample.metadata, dict) and isinstance(own := sample.metadata.get(KEY), dict):
        parts |= own
    for name, value in parts.items():
        if isinstance(value, numbers.Real | np.bool_) and math.isfinite(value):
            yield str(name), float(value)
