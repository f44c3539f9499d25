"""Tests DAPO's overlong filtering and soft punishment, and Dr.GRPO's constant length, by hand."""

from __future__ import annotations

import pytest
import torch
from train_data_cases import four, make_args, sample

from slime.config.hook_calls import Hooks
from slime.config.schema import Config
from slime.data.packing import Schedule
from slime.data.train_data import (
    convert_samples_to_train_data,
    overlong_penalty,
    post_process_rewards,
    split_by_dp,
)
from slime.types import Sample


def border(**more):
    flags = {name: more.pop(name) for name in list(more) if hasattr(make_args(), name)}
    args = make_args(**flags)
    vars(args).update(more)
    config = Config.from_args(args)
    return config, Hooks(config)


ZONE = {"overlong_buffer_len": 4, "rollout_max_response_len": 10, "overlong_penalty_factor": 0.5}


@pytest.mark.parametrize(
    ("length", "wanted"), [(1, 0.0), (6, 0.0), (7, -0.125), (8, -0.25), (10, -0.5), (12, -0.5)]
)
def test_soft_punishment(length, wanted):
    assert overlong_penalty(border(**ZONE)[0], sample(0, 0, 1.0, response=length)) == wanted
    assert overlong_penalty(border()[0], sample(0, 0, 1.0, response=length)) == 0


def test_punished_rewards_are_compared_in_their_group():
    samples = [sample(0, 0, 1.0, response=8), sample(1, 0, 0.0, response=2)]
    raw, rewards = post_process_rewards(*border(disable_grpo_std_normalization=True, **ZONE), samples)
    assert raw == [1.0, 0.0] and rewards == pytest.approx([0.375, -0.375])
    _, rewards = post_process_rewards(*border(disable_rewards_normalization=True, **ZONE), samples)
    assert rewards == [0.75, 0.0]
    data = convert_samples_to_train_data(*border(advantage_estimator="pass_at_k", **ZONE), samples)
    assert data["group_rewards"] == [[0.75, 0.0], [0.0, 0.75]] and data["raw_reward"] == [1.0, 0.0]


def test_filtering_leaves_truncated_samples_out_of_the_loss():
    samples = four()
    samples[1].status = Sample.Status.TRUNCATED
    data = convert_samples_to_train_data(*border(use_overlong_filtering=True), samples)
    assert data["loss_masks"] == [[1, 1], [0, 0], [1, 1], [1, 1]]
    assert data["rollout_mask_sums"] == [2.0, 0.0, 2.0, 2.0]
    kept = convert_samples_to_train_data(*border(), samples)
    assert kept["rewards"] == data["rewards"] and kept["loss_masks"][1] == [1, 1]


def test_dr_grpo_divides_every_rollout_by_one_length():
    samples = [sample(0, 0, 1.0, response=3), sample(1, 0, 0.0, response=1)]
    data = convert_samples_to_train_data(*border(), samples)
    schedule = Schedule(ranks=[[[[0, 1]]]], step_samples=[[0, 1]], global_batch_sizes=[2])
    for length, wanted in ((None, [6.0, 2.0]), (8, [16.0, 16.0])):
        (rank,) = split_by_dp(data, schedule)
        rank.to_device(torch.device("cpu"), per_token=False, length=length)
        assert [x[0].item() for x in rank["loss_denominators"]] == wanted
