"""Tests losses, corrections and advantages at extreme log-probs: in tokens that count, and in masked tokens, which
may hold any value."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from test_policy_loss import flags
from torch import Tensor

from slime.algo import mismatch
from slime.algo.corrections import LEVELS, MEASURES, MODES, icepop_function, vanilla_tis_function
from slime.algo.distillation import distillation_penalties
from slime.algo.estimators import ESTIMATORS, Response
from slime.algo.policy_loss import policy_loss, sft_loss
from slime.algo.ppo import compute_advantages_and_returns
from slime.algo.preference import dpo_loss
from slime.algo.surrogates import SURROGATES
from slime.algo.token_columns import TokenColumns
from slime.algo.value_loss import error_sums, value_loss
from slime.config.schema import Config

INF = math.inf
EXTREMES = (-INF, -1e30, -9999.0, 0.0, 9999.0, INF, math.nan)
PAIRS = list(itertools.product(EXTREMES, EXTREMES))
READ = ("old_log_probs", "rollout_log_probs", "ref_log_probs", "advantages")


def columns(new: float, other: float) -> TokenColumns:
    """Returns two samples of three tokens. A tool wrote each sample's second token: the policy's log-prob there
    is `new`, and its columns hold `other`."""
    mask = torch.tensor([1, 0, 1, 1, 0, 1], dtype=torch.int32)
    values = {
        "log_probs": [-1.0, new, -0.5, -2.0, new, -0.1],
        "old_log_probs": [-1.2, other, -0.6, -1.0, other, -0.4],
        "rollout_log_probs": [-1.1, other, -0.4, -1.5, other, -0.2],
        "ref_log_probs": [-1.0, other, -0.9, -1.8, other, -0.3],
        "advantages": [1.0, other, 1.0, -0.5, other, -0.5],
        "chosen_tokens": [1.0, other, 0.0, 0.0, other, 1.0],
        "entropy": [0.3, new, 0.2, 0.5, new, 0.1],
    }
    table = {name: torch.tensor(x) for name, x in values.items()}
    log_probs, entropy = (table.pop(name).requires_grad_() for name in ("log_probs", "entropy"))
    table |= {"loss_masks": mask, "loss_denominators": torch.full((6,), 4.0)}
    rows = torch.tensor([0, 0, 0, 1, 1, 1])
    return TokenColumns(log_probs, entropy, table, rows, [5, 5], [3, 3], 2.0)


def found(t: TokenColumns, given: Config) -> dict[str, Tensor]:
    """Returns loss, metrics and gradients, including those of the tool's tokens."""
    loss, sums, maxima = policy_loss(given, t)
    loss.backward()
    grads = {"d_log_probs": t.log_probs.grad, "d_entropy": t.entropy.grad}
    return {"loss": loss.detach(), **sums, **maxima, **{k: v for k, v in grads.items() if v is not None}}


CASES: dict[str, dict[str, Any]] = {
    **{name: {"pg_loss_type": name} for name in SURROGATES},
    **{
        f"{name} with every term": {
            "pg_loss_type": name,
            "use_opsm": True,
            "use_kl_loss": True,
            "kl_loss_coef": 0.1,
            "entropy_coef": 0.1,
            "get_mismatch_metrics": True,
        }
        for name in SURROGATES
    },
    **{
        f"{mode} {level}": {"use_tis": True, "tis_mode": mode, "tis_level": level}
        for mode in MODES
        for level in LEVELS
    },
    **{
        f"{kind} {level}": {
            "use_rs": True,
            "rs_type": kind,
            "rs_level": level,
            "rs_upper_bound": 2.0,
            "rs_lower_bound": 0.5,
            "rs_veto_threshold": 1e-4,
        }
        for kind in MEASURES
        for level in LEVELS
    },
    **{
        f"{kind} {unbiased}": {
            "use_kl_loss": True,
            "kl_loss_coef": 0.1,
            "kl_loss_type": kind,
            "use_unbiased_kl": unbiased,
        }
        for kind in ("k1", "k2", "k3", "low_var_kl")
        for unbiased in (False, True)
    },
    "vanilla_tis_function": {
        "use_tis": True,
        "custom_tis_function_path": "slime.algo.corrections.vanilla_tis_function",
    },
    "icepop_function": {
        "use_tis": True,
        "custom_tis_function_path": "slime.algo.corrections.icepop_function",
    },
}


@pytest.mark.parametrize("case", CASES)
def test_what_a_masked_token_holds_is_in_no_number(case: str):
    given = flags(**CASES[case])
    want = found(columns(-1.0, -1.0), given)
    assert all(x.isfinite().all() for x in want.values())
    for new, other in PAIRS:
        got = found(columns(new, other), given)
        for name, value in want.items():
            assert torch.equal(got[name], value), (name, new, other)


EXTREME_RATIOS = (-9999.0, -200.0, -88.8, 88.8, 89.5, 200.0, 9999.0)


def one_token(log_ratio: float, advantage: float, **more: float) -> TokenColumns:
    table = {name: torch.tensor([x]) for name, x in more.items()}
    table |= {
        "old_log_probs": torch.tensor([-1.0 - log_ratio]),
        "advantages": torch.tensor([advantage]),
        "loss_masks": torch.ones(1, dtype=torch.int32),
        "loss_denominators": torch.ones(1),
        "chosen_tokens": torch.zeros(1),
    }
    new = torch.tensor([-1.0]).requires_grad_()
    return TokenColumns(new, torch.zeros(1), table, torch.zeros(1, dtype=torch.long), [3], [1], 1.0)


@pytest.mark.parametrize("name", SURROGATES)
@pytest.mark.parametrize("log_ratio", EXTREME_RATIOS)
def test_an_extreme_ratio_has_a_finite_loss_and_gradient(name: str, log_ratio: float):
    """Both the fused operator and the surrogate's own function, which hooks see, compute it."""
    for advantage in (1.0, 0.0, -1.0):
        t = one_token(log_ratio, advantage)
        loss, sums, _ = policy_loss(flags(pg_loss_type=name), t)
        loss.backward()
        assert all(x.isfinite() for x in (loss, *sums.values())) and t.log_probs.grad.isfinite().all()
        ppo_kl = torch.tensor([-log_ratio]).requires_grad_()
        pg, _ = SURROGATES[name].per_token(flags(), t, t.log_probs.detach(), ppo_kl)
        assert pg.isfinite().all()
        if pg.requires_grad:
            pg.sum().backward()
            assert ppo_kl.grad.isfinite().all()


@pytest.mark.parametrize(
    ("name", "advantage", "log_ratio", "loss", "gradient"),
    [
        ("sapo", 1.0, 200.0, -4.0, 0.0),  # tau is 1, and the gate is at its upper end
        ("sapo", -1.0, 200.0, 4 / 1.05, 0.0),
        ("clip_cov", 1.0, 200.0, -1.3, 0.0),  # clipped at 1 + 0.3
        ("clip_cov", -1.0, -200.0, 0.8, 0.0),
        ("clip", 1.0, 9999.0, -1.3, 0.0),
        ("kl_cov", 1.0, 200.0, -math.exp(80), 0.0),
        ("cispo", 1.0, 200.0, 1.3, -1.3),  # -1.3 * log-prob -1
        ("gmpo", 1.0, 200.0, -1.3, 0.0),
    ],
)
def test_extreme_ratios_by_hand(name: str, advantage: float, log_ratio: float, loss: float, gradient: float):
    t = one_token(log_ratio, advantage)
    value, _, _ = policy_loss(flags(pg_loss_type=name), t)
    value.backward()
    assert value.item() == pytest.approx(loss, rel=1e-5)
    assert t.log_probs.grad.item() == pytest.approx(gradient, rel=1e-5)


@pytest.mark.parametrize("difference", [89.0, 200.0, 9999.0, INF])
def test_icepop_drops_a_ratio_that_overflows(difference: float):
    """Truncation sets it to the upper bound. The engine's log-prob is lower by `difference`."""
    for mode, weight in (("mask", 0.0), ("truncate", 2.0)):
        t = one_token(0.0, 1.0, rollout_log_probs=-1.0 - difference)
        given = flags(use_tis=True, tis_mode=mode, tis_clip_low=0.5)
        loss, sums, _ = policy_loss(given, t)
        loss.backward()
        assert loss.item() == pytest.approx(-weight) and t.log_probs.grad.item() == pytest.approx(-weight)
        assert sums["tis"].isfinite() and sums["tis_abs"].isfinite() and sums["tis_clipfrac"] == 1


@pytest.mark.parametrize("function", [vanilla_tis_function, icepop_function])
def test_the_functions_for_hooks_ignore_masked_tokens(function: Any):
    lists = {
        "train_log_probs": [torch.tensor([-1.0, 9999.0, -9999.0])],
        "rollout_log_probs": [torch.tensor([-1.0, -9999.0, INF])],
        "loss_masks": [torch.tensor([1, 0, 0])],
    }
    pg, _, metrics = function(flags().namespace(), pg_loss=torch.tensor([1.0, 1.0, 1.0]), **lists)
    assert pg[0] == 1 and pg.isfinite().all() and all(x.isfinite().all() for x in metrics.values())


@pytest.mark.parametrize(("new", "other"), PAIRS[:: len(EXTREMES) + 1])
def test_other_losses_do_not_see_masked_tokens(new: float, other: float):
    want, got = (columns(x, y) for x, y in ((-1.0, -1.0), (new, other)))
    preference = torch.tensor([1.0, 1.0, 1.0, -1.0, -1.0, -1.0])
    results = []
    for t in (want, got):
        t = TokenColumns(t.log_probs, None, {**t.columns, "preference": preference}, *vars_of(t))
        supervised, _, _ = sft_loss(t)
        preferred, _, _ = dpo_loss(flags().algorithm, t)
        (supervised + preferred).backward()
        results.append((supervised, preferred, t.log_probs.grad))
    assert all(torch.equal(a, b) and a.isfinite().all() for a, b in zip(*results, strict=True))


def vars_of(t: TokenColumns) -> tuple[Any, ...]:
    return t.sample_of_row, t.total_lengths, t.response_lengths, t.normaliser


@pytest.mark.parametrize("extreme", EXTREMES)
def test_a_critics_loss_does_not_see_masked_tokens(extreme: float):
    weights = torch.tensor([0.5, 0.0])
    values = torch.tensor([1.0, extreme]).requires_grad_()
    old, returns = torch.tensor([0.5, extreme]), torch.tensor([2.0, -extreme])
    loss, sums, _ = value_loss(values, old, returns, weights, value_clip=0.2)
    loss.backward()
    # 0.7 is farther from 2 than 1 is, so the clipped error counts, which has no gradient.
    assert loss.item() == pytest.approx(0.5 * 1.3**2) and values.grad.tolist() == [0.0, 0.0]
    assert sums["value_clipfrac"].item() == 0.5
    assert error_sums(values.detach(), returns, weights != 0).tolist() == [1, 2, 4, 1, 1]


@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.parametrize("extreme", EXTREMES)
def test_advantages_do_not_see_masked_tokens(name: str, extreme: float):
    record = ESTIMATORS[name]

    def advantages(x: float) -> tuple[Tensor, Tensor]:
        mask = torch.tensor([1, 0, 1, 0])
        reads = {
            "values": torch.tensor([0.1, x, 0.3, x]),
            "group_rewards": torch.tensor([1.0, 0.0, 0.5]),
            "turn_advantages": torch.tensor([0.1, x, 0.2, x]),
        }
        response = Response(1.0, mask, torch.tensor([0.2, x, -0.1, x]), reads)
        given = flags(kl_coef=0.1, gamma=0.9, lambd=0.8)
        of_trained = [found[mask != 0] for found in record.estimate(given, response)]
        return of_trained[0], of_trained[1]

    for got, want in zip(advantages(extreme), advantages(0.5), strict=True):
        assert torch.equal(got, want) and got.isfinite().all()


def data(extreme: float) -> dict[str, Any]:
    mask = torch.tensor([1, 0, 1])
    return {
        "rewards": [1.0],
        "loss_masks": [mask],
        "old_log_probs": [torch.tensor([-1.0, extreme, -0.5])],
        "ref_log_probs": [torch.tensor([-1.2, -extreme, -0.6])],
        "teacher_log_probs": [torch.tensor([-0.9, extreme, -0.7])],
    }


@pytest.mark.parametrize("extreme", EXTREMES)
@pytest.mark.parametrize("kind", ["k1", "k2", "k3", "low_var_kl"])
def test_the_kl_in_the_reward_and_the_teachers_penalty_do_not_see_them(kind: str, extreme: float):
    given = flags(
        advantage_estimator="reinforce_plus_plus",
        kl_coef=0.1,
        kl_loss_type=kind,
        normalize_advantages=True,
        use_opd=True,
        opd_loss_type="reverse_kl",
        opd_kl_coef=1.0,
        pg_loss_type=None,
    )
    found, want = data(extreme), data(-1.0)
    for rollout in (found, want):
        compute_advantages_and_returns(given, rollout)
    for name in ("advantages", "returns", "kl"):
        assert torch.equal(found[name][0], want[name][0]) and found[name][0].isfinite().all(), name
        assert found[name][0][1] == 0
    for of_run in (found, want):
        assert of_run["opd_reverse_kl"][0].isfinite().all()
    assert torch.equal(found["opd_reverse_kl"][0][[0, 2]], want["opd_reverse_kl"][0][[0, 2]])
    assert distillation_penalties(given.distillation, data(extreme))[0].isfinite().all()


@pytest.mark.parametrize("extreme", EXTREMES)
def test_mismatch_metrics_do_not_see_masked_tokens(extreme: float):
    old, rollout = torch.tensor([-1.0, extreme]), torch.tensor([-1.2, -extreme])
    sums = mismatch.sums(old, rollout, torch.tensor([1, 0]), torch.tensor([0, 0]), 1)
    want = mismatch.sums(old[:1], rollout[:1], torch.tensor([1]), torch.tensor([0]), 1)
    assert torch.equal(sums, want) and sums.isfinite().all()
    far = mismatch.sums(torch.tensor([-1.0]), torch.tensor([-9999.0]), torch.ones(1), torch.tensor([0]), 1)
    assert all(math.isfinite(x) for x in mismatch.figures(far.tolist()).values())


@pytest.mark.parametrize("name", ["reinforce_plus_plus", "ppo"])
def test_a_tools_tokens_discount_nothing(name: str):
    """Two turns of the model with three tool tokens between them have the values of the same turns without a tool."""
    given = flags(kl_coef=0.1, gamma=0.5, lambd=0.9)
    kl, values = torch.tensor([0.1, 0.2, 0.3, 0.4]), torch.tensor([0.4, 0.3, 0.2, 0.1])
    alone = Response(1.0, torch.ones(4), kl, {"values": values})
    place = torch.tensor([0, 1, 5, 6])
    mask = torch.zeros(7).index_fill(0, place, 1)
    spread = [torch.full((7,), 9.0).index_copy(0, place, x) for x in (kl, values)]
    tooled = Response(1.0, mask, spread[0], {"values": spread[1]})
    for got, want in zip(
        ESTIMATORS[name].estimate(given, tooled), ESTIMATORS[name].estimate(given, alone), strict=True
    ):
        torch.testing.assert_close(got[place], want)
    advantages, _ = ESTIMATORS[name].estimate(given, tooled)
    assert advantages[2:5].eq(0).all()
    if name == "reinforce_plus_plus":  # G = x + 0.5 * the next token's G
        torch.testing.assert_close(advantages[place], torch.tensor([0.0925, 0.205, 0.45, 0.96]))
