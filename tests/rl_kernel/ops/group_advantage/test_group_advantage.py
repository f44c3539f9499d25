"""Compares `group_advantage` with hand-worked numbers and the per-group formula."""

import math

import pytest
import torch

from rl_kernel import group_advantage
from rl_kernel.contract import CONTRACTS, max_error

CONTRACT = CONTRACTS["group_advantage"]


def test_by_hand_with_interleaved_groups():
    # Group 7: 1, 0, 0, 1 -> mean 1/2, Bessel deviation sqrt(1/3). Group -2: 3, 5 -> mean 4, deviation sqrt 2.
    rewards = torch.tensor([1.0, 3.0, 0.0, 0.0, 5.0, 1.0])
    ids = torch.tensor([7, -2, 7, 7, -2, 7])
    a, b = 0.5 / (math.sqrt(1 / 3) + 1e-6), 1 / (math.sqrt(2) + 1e-6)
    assert group_advantage(rewards, ids).tolist() == pytest.approx([a, -b, -a, -a, b, a], rel=1e-6)
    centred = group_advantage(rewards, ids, normalize_std=False)
    assert centred.tolist() == [0.5, -1.0, -0.5, -0.5, 1.0, 0.5]


def test_eps_is_added_to_the_deviation():
    out = group_advantage(torch.tensor([0.0, 2.0]), torch.tensor([0, 0]), eps=1.0)
    assert out.tolist() == pytest.approx([-1 / (math.sqrt(2) + 1), 1 / (math.sqrt(2) + 1)], rel=1e-6)


def test_a_group_of_one_gets_zero():
    assert group_advantage(torch.tensor([3.0, 1.0]), torch.tensor([0, 1])).tolist() == [0.0, 0.0]


@pytest.mark.parametrize("value", [0.1, -1.0, 1e6 / 3])
def test_equal_rewards_get_exactly_zero(value):
    out = group_advantage(torch.full((7,), value), torch.zeros(7, dtype=torch.int64))
    assert out.tolist() == [0.0] * 7


def test_siblings_of_one_rollout_count_once():
    # Rollout 10 fans out into three samples of reward 1; 11 and 12 have 0 and 2: mean 1, deviation 1.
    rewards = torch.tensor([1.0, 0.0, 1.0, 1.0, 2.0])
    rollouts = torch.tensor([10, 11, 10, 10, 12])
    ids = torch.zeros(5, dtype=torch.int64)
    out = group_advantage(rewards, ids, rollout_ids=rollouts)
    assert out.tolist() == pytest.approx([0.0, -1.0, 0.0, 0.0, 1.0], abs=2e-6)
    # Without rollout ids the three siblings weigh three times: the deviation of 1, 0, 1, 1, 2 is sqrt(1/2).
    assert group_advantage(rewards, ids)[4].item() == pytest.approx(math.sqrt(2), rel=1e-5)


def test_siblings_of_different_reward_count_with_their_mean():
    # Rollout 0 has 1 and 3 (mean 2), rollout 1 has 6: mean 4, deviation sqrt 8.
    out = group_advantage(
        torch.tensor([1.0, 3.0, 6.0]), torch.zeros(3).long(), rollout_ids=torch.tensor([0, 0, 1])
    )
    assert out.tolist() == pytest.approx([-3 / math.sqrt(8), -1 / math.sqrt(8), 2 / math.sqrt(8)], rel=1e-5)


def test_a_lone_rollout_that_fans_out_is_not_divided():
    out = group_advantage(torch.tensor([1.0, 3.0]), torch.zeros(2).long(), rollout_ids=torch.zeros(2).long())
    assert out.tolist() == [-1.0, 1.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_contract(dtype):
    generator = torch.Generator().manual_seed(0)
    rewards = torch.randn(500, generator=generator).to(dtype)
    ids = torch.randint(0, 40, (500,), generator=generator)
    want = torch.empty(500, dtype=torch.float64)
    for group in ids.unique():
        values = rewards[ids == group].double()
        want[ids == group] = (values - values.mean()) / (values.std() + 1e-6)
    out = group_advantage(rewards, ids)
    assert out.dtype == torch.float32
    assert max_error(out, want) <= CONTRACT.outputs[str(dtype).removeprefix("torch.")].bound(want)
    assert torch.equal(out, group_advantage(rewards, ids))
    assert torch.equal(out, group_advantage(rewards, ids.int() * 1000 - 7))


def test_the_other_groups_of_a_batch_do_not_matter():
    generator = torch.Generator().manual_seed(0)
    rewards, ids = torch.randn(60, generator=generator), torch.arange(60) % 7
    whole = group_advantage(rewards, ids)
    for group in range(7):
        alone = group_advantage(rewards[ids == group], ids[ids == group])
        assert torch.equal(alone, whole[ids == group])


def test_no_samples():
    assert group_advantage(torch.zeros(0), torch.zeros(0).long()).shape == (0,)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rewards": torch.zeros(2, 2)}, r"rewards must have shape \[S\], got \[2, 2\]"),
        ({"rewards": torch.tensor([1.0, 0.0, math.nan])}, "rewards must be finite, got nan for sample 2"),
        ({"rewards": torch.zeros(3).long()}, "rewards must be one of float32.* got int64"),
        ({"rewards": torch.zeros(3, requires_grad=True)}, "rewards must not require grad"),
        ({"group_ids": torch.zeros(2).long()}, r"group_ids must have shape \[3\], got \[2\]"),
        ({"group_ids": torch.zeros(3)}, "group_ids must be one of int64, int32, got float32"),
        ({"rollout_ids": torch.zeros(4).long()}, r"rollout_ids must have shape \[3\], got \[4\]"),
        (
            {"group_ids": torch.tensor([5, 5, 9]), "rollout_ids": torch.tensor([1, 2, 2])},
            r"rollout_ids must lie in one group each, got rollout 2 in groups \[5, 9\]; number",
        ),
        ({"eps": 0.0}, "eps must be finite and be > 0, got 0.0"),
    ],
)
def test_bad_input_is_named(change, message):
    inputs = {"rewards": torch.zeros(3), "group_ids": torch.zeros(3).long()} | change
    with pytest.raises(ValueError, match=message):
        group_advantage(**inputs)
