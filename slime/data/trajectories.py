"""Trajectories: the samples of a rollout. A custom generate function may fan a sample out to several siblings, which
share a `rollout_id`; any other sample is its own trajectory."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import TypeAlias

from slime.types import Sample

Key: TypeAlias = tuple[str, int]
"""Key of a trajectory. The samples of a trajectory have the same key, and two trajectories of a batch have different
keys."""


def trajectory_keys(samples: Sequence[Sample]) -> list[Key]:
    """Returns one key per sample."""
    return [
        ("rollout", s.rollout_id) if s.rollout_id is not None else ("sample", i)
        for i, s in enumerate(samples)
    ]


def trajectories(samples: Sequence[Sample]) -> list[list[Sample]]:
    """Returns the samples per trajectory, in order of first appearance."""
    found: dict[Key, list[Sample]] = {}
    for key, sample in zip(trajectory_keys(samples), samples, strict=True):
        found.setdefault(key, []).append(sample)
    return list(found.values())


def trajectory_rewards(samples: Sequence[Sample], reward_key: str | None) -> list[float]:
    """Returns the mean reward of the samples per trajectory. `reward_key` is the entry to use if a reward is a
    record."""
    return [statistics.fmean(s.reward_value(reward_key) for s in parts) for parts in trajectories(samples)]


def truncated_trajectories(samples: Sequence[Sample]) -> list[bool]:
    """Returns true for each trajectory with a truncated sample."""
    return [any(s.status is Sample.Status.TRUNCATED for s in parts) for parts in trajectories(samples)]
