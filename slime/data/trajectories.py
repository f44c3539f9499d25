"""Trajectories: the samples of one rollout. A custom generate function may fan a sample out to several siblings, which
share a `rollout_id`; any other sample is a trajectory of its own."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import TypeAlias

from slime.types import Sample

Key: TypeAlias = tuple[str, int]
"""The same for the samples of one trajectory, and different for others of one batch."""


def trajectory_keys(samples: Sequence[Sample]) -> list[Key]:
    """One key per sample."""
    return [
        ("rollout", s.rollout_id) if s.rollout_id is not None else ("sample", i)
        for i, s in enumerate(samples)
    ]


def trajectories(samples: Sequence[Sample]) -> list[list[Sample]]:
    """The samples of each trajectory, in order of first appearance."""
    found: dict[Key, list[Sample]] = {}
    for key, sample in zip(trajectory_keys(samples), samples, strict=True):
        found.setdefault(key, []).append(sample)
    return list(found.values())


def trajectory_rewards(samples: Sequence[Sample], reward_key: str | None) -> list[float]:
    """The reward of each trajectory: the mean of its samples. `reward_key`: the entry of a reward that is a record."""
    return [statistics.fmean(s.reward_value(reward_key) for s in parts) for parts in trajectories(samples)]


def truncated_trajectories(samples: Sequence[Sample]) -> list[bool]:
    """Whether a part of each trajectory is truncated."""
    return [any(s.status is Sample.Status.TRUNCATED for s in parts) for parts in trajectories(samples)]
