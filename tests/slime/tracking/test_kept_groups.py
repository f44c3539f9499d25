"""Tests the samples of a rollout that a run keeps for users: whole groups, the one with the largest spread of rewards
first."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slime.rollout.learning import spread
from slime.tracking.samples import choose_samples, read_reward_number, read_samples, write_samples
from slime.types import Sample, SampleGroup

DONE, CUT, ABORTED = Sample.Status.COMPLETED, Sample.Status.TRUNCATED, Sample.Status.ABORTED


def group(number: int, rewards: Sequence[Any], status: Sample.Status = DONE) -> SampleGroup:
    return [
        Sample(group_index=number, tokens=[1, 2], response_length=1, reward=reward, status=status)
        for reward in rewards
    ]


def groups_kept(groups: Sequence[SampleGroup], keep: int) -> list[tuple[int, int]]:
    """Returns (group, number of its kept samples), in the rollout's order."""
    flat = [sample for each in groups for sample in each]
    places = choose_samples(groups, [spread(each, None) for each in groups], keep)
    assert places == sorted(set(places)) and len(places) <= max(keep, 0)
    numbers = [flat[place].group_index for place in places]
    return [(number, numbers.count(number)) for number in dict.fromkeys(numbers)]


def test_the_first_group_and_that_with_the_largest_spread_are_kept_whole() -> None:
    rewards = [[0.0] * 8, [0.0] * 8, [0.0, 1.0] * 4, [0.0] * 7 + [1.0], [1.0] * 8]
    assert groups_kept([group(i, each) for i, each in enumerate(rewards)], 16) == [(0, 8), (2, 8)]


def test_further_groups_are_far_apart_and_none_is_in_parts() -> None:
    same = [group(i, [1.0] * 4) for i in range(12)]
    assert groups_kept(same, 16) == [(0, 4), (3, 4), (6, 4), (9, 4)]
    assert groups_kept(same, 18) == [(0, 4), (3, 4), (6, 4), (9, 4)]
    same[10] = group(10, [0.0, 1.0, 0.0, 1.0])
    assert groups_kept(same, 16) == [(0, 4), (3, 4), (6, 4), (10, 4)]
    assert groups_kept(same[:2], 16) == [(0, 4), (1, 4)]
    singles = [group(i, [None]) for i in range(64)]  # SFT has such groups
    assert [number for number, _ in groups_kept(singles, 16)] == list(range(0, 64, 4))


def test_a_group_that_is_larger_than_the_limit_keeps_its_first_samples() -> None:
    rewards = [[1.0] * 20, [0.0, 1.0] * 10]
    assert groups_kept([group(i, each) for i, each in enumerate(rewards)], 16) == [(1, 16)]
    sixteen = [group(0, [1.0] * 16), group(1, [0.0] + [1.0] * 15), group(2, [1.0] * 16)]
    assert groups_kept(sixteen, 16) == [(1, 16)]
    assert groups_kept(sixteen[:1], 16) == [(0, 16)]


def test_groups_of_several_sizes_and_without_samples() -> None:
    """Agents return several samples, and a user's filter may leave a group empty."""
    groups = [[], group(1, [0.5] * 9), group(2, [0.0, 1.0, 1.0]), group(3, [0.5] * 4), []]
    assert groups_kept(groups, 16) == [(1, 9), (2, 3), (3, 4)]
    assert groups_kept(groups, 8) == [(2, 3), (3, 4)]
    assert groups_kept([], 16) == [] and groups_kept([[]], 16) == [] and groups_kept(groups, 0) == []


def test_a_group_with_a_sample_that_has_not_ended_is_not_the_first() -> None:
    groups = [group(0, [0.0] * 8, ABORTED), group(1, [0.0] * 8, CUT), group(2, [0.0, 1.0] * 4)]
    assert groups_kept(groups, 16) == [(1, 8), (2, 8)]
    assert groups_kept(groups[:1], 16) == [(0, 8)]


def test_the_spread_of_rewards_counts_trajectories() -> None:
    assert spread(group(0, [0.0, 1.0]), None) == 0.5
    assert spread(group(0, [{"score": 0.0}, {"score": 4.0}]), "score") == 2.0
    assert spread(group(0, [{"score": 0.0}, {"score": 4.0}]), None) == 0.0
    assert spread(group(0, [None, 3.0]), None) == 0.0
    parts = group(0, [0.0, 2.0, 1.0])
    parts[0].rollout_id = parts[1].rollout_id = 7  # one trajectory, whose reward is 1
    assert spread(parts, None) == 0.0


@pytest.mark.parametrize(
    ("reward", "number"),
    [
        *((1, 1.0), (True, 1.0), (np.float32(0.5), 0.5), (None, None), ("1", None)),
        *((float("nan"), None), (float("inf"), None), ({"a": np.int64(2)}, 2.0), ({"b": 1}, None)),
    ],
)
def test_the_number_of_a_reward(reward: Any, number: float | None) -> None:
    assert read_reward_number(reward, "a") == number


def test_a_file_has_the_size_of_each_group_and_the_number_of_each_reward(tmp_path: Path) -> None:
    samples = [*group(4, [{"score": 0.5, "format": 1}] * 3), *group(5, [1.0])]
    write_samples(tmp_path, 0, samples, [0, 1, 3], str, reward_key="score")
    found = [(one.place, one.group, one.group_size, one.score) for one in read_samples(tmp_path, 0)]
    assert found == [(0, 4, 3, 0.5), (1, 4, 3, 0.5), (3, 5, 1, 1.0)]
    path = tmp_path / "samples" / "0.jsonl"
    head, *lines = map(json.loads, path.read_text().splitlines())
    older = {name: value for name, value in lines[0].items() if name not in ("group_size", "score")}
    wrong = [lines[1] | {"group_size": "3"}, lines[1] | {"score": "high"}]
    path.write_text("\n".join(json.dumps(line) for line in (head, older, *wrong)) + "\n")
    (one,) = read_samples(tmp_path, 0)
    assert (one.place, one.group_size, one.score) == (0, None, None)
