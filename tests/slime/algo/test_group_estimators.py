"""Compares RLOO and pass@k from the rewards of a group with numbers by hand and brute force."""

from __future__ import annotations

import itertools

import pytest
import torch
from train_data_cases import border, sample

from slime.algo.advantage import compute_advantages
from slime.algo.estimators import Response
from slime.algo.estimators.pass_at_k import contribution
from slime.config.schema import Config
from slime.data.train_data import convert_samples_to_train_data


def advantages(data, name, **flags):
    """Returns each sample's advantage in train data, as the trainer computes it."""
    given = Config.from_flat({"advantage_estimator": name, **flags})
    ones = torch.ones(1)
    responses = [
        Response(reward, ones, 0 * ones, {"group_rewards": torch.as_tensor(group)})
        for reward, group in zip(data["rewards"], data["group_rewards"], strict=True)
    ]
    return [x.item() for x in compute_advantages(given, responses)[0]]


def converted(name, samples):
    return convert_samples_to_train_data(*border(advantage_estimator=name), samples)


def test_rloo_subtracts_the_mean_of_the_others():
    data = converted("rloo", [sample(i, 0, r) for i, r in enumerate([1.0, 0.0, 0.0, 3.0])])
    # 1 - 3/3, 0 - 4/3, 0 - 4/3, 3 - 1/3
    assert advantages(data, "rloo") == pytest.approx([0.0, -4 / 3, -4 / 3, 8 / 3], abs=1e-6)


def test_rloo_counts_the_siblings_of_a_rollout_once():
    samples = [sample(0, 0, 1.0), sample(1, 0, 0.0, rollout_id=9), sample(2, 0, 0.5, rollout_id=9)]
    # The two rollouts have rewards 1 and 0.25.
    assert advantages(converted("rloo", samples), "rloo")[0] == pytest.approx(0.75)


def test_rloo_refuses_a_group_of_one():
    data = converted("rloo", [sample(0, 0, 1.0), sample(1, 1, 0.0)])
    with pytest.raises(ValueError, match="rloo must have at least 2 rollouts in each group, got 1"):
        advantages(data, "rloo")


def by_subsets(reward, others, k):
    found = [max(reward - max(s), 0.0) for s in itertools.combinations(others, k - 1)]
    return sum(found) / len(found)


@pytest.mark.parametrize("k", [2, 3, 4, 5])
def test_contribution_is_the_mean_over_subsets(k):
    rewards = [0.5, 2.0, 2.0, -1.0, 1.0]
    for i, reward in enumerate(rewards):
        others = rewards[:i] + rewards[i + 1 :]
        assert contribution(reward, others, k) == pytest.approx(by_subsets(reward, others, k))


def test_pass_at_k_of_right_and_wrong_answers():
    # 2 of 4 are right, and k = 2: a right answer counts if the other answer of the pair is wrong, in 2 of 3 pairs.
    assert [contribution(r, [1.0, 0.0, 0.0], 2) for r in (1.0, 0.0)] == pytest.approx([2 / 3, 0.0])
    # In no group of 4 is the answer the only right one.
    assert contribution(1.0, [1.0, 0.0, 0.0], 4) == 0


def test_pass_at_k_of_the_whole_group_is_best_less_second():
    data = converted("pass_at_k", [sample(i, 0, r) for i, r in enumerate([0.25, 2.0, 0.5])])
    assert data["rewards"] == [0.25, 2.0, 0.5]  # they are not compared with the group before
    assert advantages(data, "pass_at_k") == pytest.approx([0.0, 1.5, 0.0])


def test_pass_at_k_counts_the_siblings_of_a_rollout_once():
    samples = [sample(0, 0, 1.0), sample(1, 0, 1.0, rollout_id=9), sample(2, 0, 4.0, rollout_id=9)]
    # The two rollouts have rewards 1 and 2.5.
    assert advantages(converted("pass_at_k", samples), "pass_at_k") == pytest.approx([0.0, 1.5, 1.5])


def test_pass_at_k_refuses_a_group_of_one():
    alone = converted("pass_at_k", [sample(0, 0, 1.0), sample(1, 1, 0.0)])
    with pytest.raises(ValueError, match="--pass-at-k must be from 2 to the rollouts of a group, got 1"):
        advantages(alone, "pass_at_k")


def in_turns(index, rewards, reward=0.0):
    """Returns a sample with two turns of two tokens and a tool's token between them."""
    made = sample(index, 0, reward)
    made.tokens, made.response_length = [1, 5, 6, 7, 8, 9], 5
    made.loss_mask, made.rollout_log_probs = [1, 1, 0, 1, 1], [-1.0] * 5
    made.metadata = {} if rewards is None else {"turn_rewards": rewards}
    return made


def test_grpo_turn_adds_the_advantage_of_the_turn():
    samples = [in_turns(0, [1.0, 0.0], 1.0), in_turns(1, [0.0, 2.0], 0.0)]
    data = converted("grpo_turn", samples)
    # The rewards from turn 0 on are 1 and 2, from turn 1 on 0 and 2. Two numbers normalize to -+ 1 / sqrt(2).
    first, second = data["turn_advantages"]
    half = 2**-0.5
    assert first == pytest.approx([-half, -half, 0, -half, -half], abs=1e-4)
    assert second == pytest.approx([half, half, 0, half, half], abs=1e-4)
    given = Config.from_flat({"advantage_estimator": "grpo_turn"})
    response = Response(0.5, torch.ones(5), torch.zeros(5), {"turn_advantages": torch.tensor(first)})
    assert compute_advantages(given, [response])[0][0].tolist() == pytest.approx([0.5 + a for a in first])


def test_the_flags_of_normalization_hold_for_turns_too():
    """The flags give differences without the division, and the rewards themselves."""
    samples = [in_turns(0, [1.0, 0.0], 1.0), in_turns(1, [0.0, 2.0], 0.0)]

    config, hooks = border(advantage_estimator="grpo_turn")

    def turns(flag):
        return convert_samples_to_train_data(config.with_values(**{flag: True}), hooks, samples)

    data = turns("disable_grpo_std_normalization")  # --use-dr-grpo sets it
    assert data["turn_advantages"] == [[-0.5, -0.5, 0, -1, -1], [0.5, 0.5, 0, 1, 1]]
    assert data["rewards"] == [0.5, -0.5]
    data = turns("disable_rewards_normalization")
    assert data["turn_advantages"] == [[1, 1, 0, 0, 0], [2, 2, 0, 2, 2]] and data["rewards"] == [1.0, 0.0]


def test_turn_rewards_are_one_per_turn():
    assert (
        converted("grpo_turn", [in_turns(0, None), in_turns(1, None)])["turn_advantages"] == [[0.0] * 5] * 2
    )
    for wrong in ([1.0], [1.0, float("nan")]):
        with pytest.raises(ValueError, match="one finite number per turn"):
            converted("grpo_turn", [in_turns(0, wrong), in_turns(1, None)])
