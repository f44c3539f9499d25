"""Compares the policy losses of --pg-loss-type and their gradients with numbers by hand."""

from __future__ import annotations

import math
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from test_policy_loss import columns, flags

from slime.algo.estimators import surrogate_for
from slime.algo.policy_loss import policy_loss
from slime.algo.surrogates import SURROGATES, covariance
from slime.algo.token_columns import TokenColumns

LOG = math.log
WHOLE = {"loss_masks": torch.tensor([1, 1, 1]), "loss_denominators": torch.tensor([4.0, 4.0, 2.0])}
"""Three tokens, which all count. The ratios are 2, 5 (advantage 1) in one sample, and 0.5 (advantage -1) in another."""


def trained(name, t, **fields):
    """Returns (loss, gradient of the log-probs, metrics) of a policy loss."""
    loss, sums, _ = policy_loss(flags(pg_loss_type=name, **fields), t)
    loss.backward()
    return loss.item(), t.log_probs.grad, {key: value.item() for key, value in sums.items()}


def test_the_flag_replaces_the_loss_of_the_estimator():
    assert surrogate_for(flags().algorithm).name == "clip"
    assert surrogate_for(flags(advantage_estimator="gspo").algorithm).name == "gspo"
    assert surrogate_for(flags(advantage_estimator="gspo", pg_loss_type="sapo").algorithm).name == "sapo"
    with pytest.raises(ValueError, match="--pg-loss-type must be one of clip, gspo, .*, got klip"):
        surrogate_for(flags(pg_loss_type="klip").algorithm)


def test_reinforce():
    loss, gradient, _ = trained("reinforce", columns())
    # token 0: -1 * log 0.4; token 2: 1 * log 0.2; two rollouts with one trained token
    assert loss == pytest.approx((-LOG(0.4) + LOG(0.2)) / 2)
    torch.testing.assert_close(gradient, torch.tensor([-0.5, 0.0, 0.5]))


def test_sapo():
    loss, gradient, sums = trained("sapo", columns(), sapo_tau_pos=1.0, sapo_tau_neg=2.0)
    # token 0: r = 2, tau = 1; token 2: r = 0.5, tau = 2
    high, low = 1 / (1 + math.exp(-1.0)), 1 / (1 + math.exp(1.0))
    assert loss == pytest.approx((-4 * high + 4 / 2 * low) / 2, rel=1e-6)
    # d/dlogp of 4 / tau * sigmoid(tau (r - 1)) is 4 * s * (1 - s) * r
    wanted = [-4 * high * (1 - high) * 2 / 2, 0.0, 4 * low * (1 - low) * 0.5 / 2]
    torch.testing.assert_close(gradient, torch.tensor(wanted))
    assert sums["pg_clipfrac"] == 0


def test_sapo_at_ratio_one_has_the_gradient_of_reinforce():
    _, gradient, _ = trained("sapo", columns(old_log_probs=None), sapo_tau_pos=1.0, sapo_tau_neg=1.05)
    torch.testing.assert_close(gradient, torch.tensor([-0.5, 0.0, 0.5]))


def test_gmpo():
    loss, gradient, sums = trained("gmpo", columns(**WHOLE), eps_clip=0.6, eps_clip_high=3.0)
    # sample 0: log-ratios log 2, and log 5 clipped to log 4: sqrt(8); sample 1: 0.5 is not below 0.4
    assert loss == pytest.approx((-math.sqrt(8) + 0.5) / 2, rel=1e-6)
    assert sums["pg_clipfrac"] == pytest.approx(1 / 4)
    # Token 0 has half of its sequence's gradient, token 1 is clipped.
    torch.testing.assert_close(gradient, torch.tensor([-math.sqrt(8) / 2 / 2, 0.0, 0.25]))


def test_gmpo_clips_negative_advantages_from_below():
    t = columns(**WHOLE, advantages=torch.tensor([1.0, 1.0, -2.0]))
    loss, gradient, sums = trained("gmpo", t, eps_clip=0.2, eps_clip_high=9.0)
    assert loss == pytest.approx((-math.sqrt(10) + 2 * 0.8) / 2, rel=1e-6)
    assert sums["pg_clipfrac"] == pytest.approx(1 / 2) and gradient[2] == 0


def test_gspo_token_has_the_value_of_gspo_and_the_gradient_of_the_token():
    advantages = torch.tensor([1.0, 3.0, -1.0])
    clips = {"eps_clip": 0.9, "eps_clip_high": 10.0}
    loss, gradient, _ = trained("gspo_token", columns(**WHOLE, advantages=advantages), **clips)
    whole, mixed, _ = trained("gspo", columns(**WHOLE, advantages=advantages), **clips)
    ratio = math.sqrt(10)  # exp((log 2 + log 5) / 2)
    assert loss == pytest.approx(whole) == pytest.approx((-ratio * (1 + 3) / 2 + 0.5) / 2, rel=1e-6)
    torch.testing.assert_close(gradient, torch.tensor([-ratio / 4, -3 * ratio / 4, 0.25]))
    torch.testing.assert_close(mixed, torch.tensor([-ratio / 2, -ratio / 2, 0.25]))


def test_clip_cov_and_kl_cov_treat_chosen_tokens_apart():
    chosen = torch.tensor([1.0, 0.0, 0.0])
    loss, gradient, sums = trained("clip_cov", columns(chosen_tokens=chosen))
    assert loss == pytest.approx(0.8 / 2)  # without token 0
    assert sums["pg_clipfrac"] == pytest.approx(1.0) and gradient[0] == 0
    loss, gradient, sums = trained("kl_cov", columns(chosen_tokens=chosen), kl_cov_coef=0.5)
    # token 0: -2 + 0.5 * |log 2|; token 2: 0.5, not clipped
    assert loss == pytest.approx((-2 + 0.5 * LOG(2) + 0.5) / 2, rel=1e-6)
    torch.testing.assert_close(gradient, torch.tensor([(-2 + 0.5) / 2, 0.0, 0.25]))
    assert sums["pg_clipfrac"] == 0


ADVANTAGES = torch.tensor([2.0, 2.0, 0.0, 0.0])
OLD = torch.tensor([-1.0, -3.0, -1.0, -3.0])
"""Centred advantages 1, 1, -1, -1 and log-probs 1, -1, 1, -1, whose covariances are 1, -1, -1, 1."""


def test_covariance_by_hand():
    found, count = covariance.covariance(ADVANTAGES, OLD, None)
    assert found.tolist() == [1.0, -1.0, -1.0, 1.0] and count == 4


def choice(name, advantages=ADVANTAGES, old=OLD, **fields):
    choose = SURROGATES[name].choose
    assert choose is not None
    return choose(flags(**fields).algorithm, advantages, old, torch.arange(len(old)), None)


def test_kl_cov_chooses_the_largest():
    advantages = torch.tensor([4.0, 2.0, 0.0, 0.0])  # centred: 2.5, 0.5, -1.5, -1.5
    assert choice("kl_cov", advantages, kl_cov_ratio=0.25).tolist() == [1, 0, 0, 0]
    assert choice("kl_cov", advantages, kl_cov_ratio=0.5).tolist() == [1, 0, 0, 1]
    # The other tokens have a negative covariance.
    assert choice("kl_cov", advantages, kl_cov_ratio=1.0).tolist() == [1, 0, 0, 1]


def test_clip_cov_draws_from_the_band():
    band = {"clip_cov_lb": 0.5, "clip_cov_ub": 5.0}
    assert choice("clip_cov", clip_cov_ratio=0.5, **band).tolist() == [1, 0, 0, 1]
    draws = covariance.uniform(torch.arange(4))
    first = [1, 0, 0, 0] if draws[0] < draws[3] else [0, 0, 0, 1]
    assert choice("clip_cov", clip_cov_ratio=0.0, **band).tolist() == first  # at least one
    assert choice("clip_cov", clip_cov_ratio=1.0, clip_cov_lb=2.0, clip_cov_ub=5.0).sum() == 0


def test_draws_are_uniform_and_differ():
    keys = torch.cat([i * 1_000_003 + torch.arange(1000) for i in range(20)])
    draws = covariance.uniform(keys)
    assert draws.min() >= 0 and draws.max() < 1
    assert draws.mean().item() == pytest.approx(0.5, abs=0.01)
    assert torch.histc(draws, 10, 0, 1).min() > 1800 and len(draws.unique()) > 19900


def test_ranks_choose_as_one(monkeypatch):
    """Two workers meet at every sum, as ranks do in an all-reduce; the first has no token in the band."""
    generator = torch.Generator().manual_seed(0)
    advantages, old = torch.randn(2, 200, generator=generator)
    keys = torch.arange(200)
    fields = {"clip_cov_ratio": 0.05, "clip_cov_lb": 0.1, "clip_cov_ub": 5.0, "kl_cov_ratio": 0.05}
    algorithm = flags(**fields).algorithm
    alone = {
        name: SURROGATES[name].choose(algorithm, advantages, old, keys, None)
        for name in ("clip_cov", "kl_cov")
    }
    parts = [slice(0, 3), slice(3, 200)]
    barrier, given = threading.Barrier(len(parts)), {}

    def add_up(values, place):
        given[place] = values.clone()
        barrier.wait(10)
        values.copy_(given[0] + given[1])
        barrier.wait(10)

    monkeypatch.setattr(covariance, "_add_up", add_up)
    for name, wanted in alone.items():
        assert wanted.sum() == 10

        def work(i, choose=SURROGATES[name].choose):
            return choose(algorithm, *(x[parts[i]] for x in (advantages, old, keys)), i)

        with ThreadPoolExecutor(2) as pool:
            assert torch.equal(torch.cat(list(pool.map(work, (0, 1)))), wanted), name


@pytest.mark.parametrize("name", [name for name, record in SURROGATES.items() if not record.reads_sequences])
def test_blocks_of_tokens_add_up(name):
    """The one-pass operator calls the loss with some tokens at a time, and with the lengths of whole responses."""
    given = flags(
        pg_loss_type=name,
        sapo_tau_pos=1.0,
        sapo_tau_neg=1.05,
        kl_cov_coef=1.0,
        use_tis=True,
        tis_mode="mask",
        use_rs=True,
        rs_type="k3",
        rs_level="token",
        rs_upper_bound=1.0,
        rs_veto_threshold=None,
    )
    whole = columns(chosen_tokens=torch.tensor([0.0, 0.0, 1.0]))
    loss, sums, _ = policy_loss(given, whole)
    parts = []
    for rows in (slice(0, 1), slice(1, 3)):
        some = {key: value[rows] for key, value in whole.columns.items()}
        shape = whole.sample_of_row[rows], whole.total_lengths, whole.response_lengths, whole.normaliser
        entropy = whole.entropy
        assert entropy is not None
        parts.append(policy_loss(given, TokenColumns(whole.log_probs[rows], entropy[rows], some, *shape)))
    assert sum(part[0].item() for part in parts) == pytest.approx(loss.item(), rel=1e-6)
    for metric, value in sums.items():
        found = sum(part[1][metric].item() for part in parts)
        assert found == pytest.approx(value.item(), rel=1e-6, abs=1e-7), metric
