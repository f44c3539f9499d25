"""Compares advantages, returns and importance weights with numbers by hand."""

import math

import pytest
import torch

from slime.algo.advantage import compute_advantages
from slime.algo.estimators import Response
from slime.algo.importance import opsm_mask, sequence_mean
from slime.algo.returns import discounted_returns, discounted_sum, gae
from slime.config.schema import Config


def flags(**fields):
    return Config.from_flat(fields)


MASKS = [torch.tensor([1, 1, 0]), torch.tensor([1])]
KL = [torch.tensor([0.1, 0.2, 0.3]), torch.tensor([0.5])]


def responses(*rewards):
    return [Response(*of_sample) for of_sample in zip(rewards, MASKS, KL, strict=True)]


def test_grpo_spreads_the_reward_over_all_tokens():
    advantages, returns = compute_advantages(flags(), responses(2.0, -1.0))
    assert [a.tolist() for a in advantages] == [[2.0, 2.0, 2.0], [-1.0]]
    assert [r.tolist() for r in returns] == [[2.0, 2.0, 2.0], [-1.0]]


def test_reinforce_plus_plus_discounts_from_the_last_trained_token():
    out = discounted_returns(1.0, MASKS[0], KL[0], kl_coef=1.0, gamma=0.5)
    # x = [-0.1, -0.2 + 1, 0]; G_2 = 0, G_1 = 0.8, G_0 = -0.1 + 0.4
    torch.testing.assert_close(out, torch.tensor([0.3, 0.8, 0.0]))


def test_reinforce_plus_plus_baseline_subtracts_the_penalty():
    advantages, _ = compute_advantages(
        flags(advantage_estimator="reinforce_plus_plus_baseline", kl_coef=2.0), responses(1.0, 0.0)
    )
    torch.testing.assert_close(advantages[0], torch.tensor([0.8, 0.6, 0.4]))
    torch.testing.assert_close(advantages[1], torch.tensor([-1.0]))


def test_whitening_uses_trained_tokens_only():
    advantages, returns = compute_advantages(flags(normalize_advantages=True), responses(3.0, 0.0))
    # The trained values are 3, 3, 0: mean 2, Bessel variance 3.
    torch.testing.assert_close(advantages[1], torch.tensor([-2 / math.sqrt(3)]), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(advantages[0][:2], torch.full((2,), 1 / math.sqrt(3)), rtol=1e-6, atol=1e-6)
    assert returns[0].tolist() == [3.0, 3.0, 3.0]


def test_ppo_estimates_over_the_trained_tokens():
    """A tool's token is between two trained tokens. It is not an action, so the second trained token follows the
    first."""
    values = torch.tensor([0.5, 9.0, 0.25])
    response = Response(
        1.0, torch.tensor([1, 0, 1]), torch.tensor([0.0, 0.3, 0.5]), columns={"values": values}
    )
    given = flags(advantage_estimator="ppo", kl_coef=0.2, gamma=0.5, lambd=0.5)
    (advantages,), (returns,) = compute_advantages(given, [response])
    # x = [0, 1 - 0.1]; delta_1 = 0.9 - 0.25 = 0.65; delta_0 = 0.5 * 0.25 - 0.5; A_0 = -0.375 + 0.25 * 0.65
    torch.testing.assert_close(advantages, torch.tensor([-0.2125, 0.0, 0.65]))
    torch.testing.assert_close(returns, torch.tensor([0.2875, 9.0, 0.9]))
    removed = Response(1.0, torch.zeros(3, dtype=torch.int32), torch.zeros(3), columns={"values": values})
    assert compute_advantages(given, [removed])[0][0].tolist() == [0, 0, 0]


@pytest.mark.parametrize("length", [1, 2, 3, 7, 64, 129])
def test_discounted_sum_equals_the_recurrence(length):
    x = torch.randn(2, length, generator=torch.Generator().manual_seed(length))
    expected, total = torch.zeros_like(x), torch.zeros(2)
    for t in reversed(range(length)):
        total = x[:, t] + 0.9 * total
        expected[:, t] = total
    torch.testing.assert_close(discounted_sum(x, 0.9), expected)


def test_gae_by_hand():
    advantages, returns = gae(torch.tensor([[0.0, 1.0]]), torch.tensor([[0.5, 0.25]]), gamma=0.5, lambd=0.5)
    # delta_1 = 1 - 0.25 = 0.75; delta_0 = 0.125 - 0.5 = -0.375; A_0 = -0.375 + 0.25 * 0.75
    torch.testing.assert_close(advantages, torch.tensor([[-0.1875, 0.75]]))
    torch.testing.assert_close(returns, torch.tensor([[0.3125, 1.0]]))


def test_sequence_mean_and_opsm():
    rows = torch.tensor([0, 0, 1, 2])
    mean = sequence_mean(torch.tensor([1.0, 3.0, 5.0, 7.0]), torch.tensor([1, 1, 0, 1]), rows, 3)
    assert mean.tolist() == [2.0, 0.0, 7.0]
    keep, dropped = opsm_mask(
        torch.tensor([-1.0, 1.0, -1.0, -1.0]), torch.tensor([0.2, 0.2, 0.01]), rows, delta=0.1
    )
    assert keep.tolist() == [0.0, 1.0, 0.0, 1.0]
    assert dropped.tolist() == [1.0, 0.0, 1.0, 0.0]
