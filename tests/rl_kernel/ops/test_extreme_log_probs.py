"""Tests values and gradients of operators at extreme log-probs, in tokens that count and in masked tokens."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from rl_kernel import grpo_loss, masked_mean, masked_sum, masked_whiten, ratio_kl
from rl_kernel.ops.ratio_kl import KL_TYPES

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
INF = math.inf
EXTREMES = (-INF, -1e30, -9999.0, -88.8, -0.5, 0.0, 9999.0, INF, math.nan)
TOP = math.exp(80)
IMPLS = pytest.mark.parametrize(
    "impl",
    [
        "reference",
        pytest.param(
            "triton", marks=pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")
        ),
    ],
)


@pytest.fixture(autouse=True)
def _has_triton(request: pytest.FixtureRequest) -> None:
    if request.node.callspec.params["impl"] == "triton":
        pytest.importorskip("triton")


def tensor(*values: float) -> Tensor:
    return torch.tensor(values, device=DEVICE)


def kl_estimate(new: float, old: float, ref: float, impl: str, **flags: Any) -> tuple[float, float, float]:
    """Returns ratio, KL and the gradient of the KL for one token."""
    leaf = tensor(new).requires_grad_()
    ratio, kl = ratio_kl(leaf, tensor(old), tensor(ref), None, impl=impl, **flags)
    kl.sum().backward()
    assert leaf.grad is not None
    return ratio.item(), kl.item(), leaf.grad.item()


@IMPLS
@pytest.mark.parametrize("new", [-INF, -1e30, -9999.0, -100.0])
def test_k3_of_a_policy_without_probability_is_large_and_positive(impl, new):
    """k3 has no gradient at such a token, like the ratio. If both terms had no bound, k3 would be -inf."""
    _, kl, slope = kl_estimate(new, new if new > -INF else 0.0, 0.0, impl, kl_type="k3")
    assert kl == pytest.approx(TOP, rel=1e-5) and slope == 0
    assert kl_estimate(new, 0.0, 0.0, impl, kl_type="low_var_kl")[1:] == (10.0, 0.0)


@IMPLS
@pytest.mark.parametrize("kl_type", KL_TYPES)
def test_the_weight_of_a_policy_without_probability_takes_the_kl_away(impl, kl_type):
    """The limit of r * log(r) at 0 is 0, and not 0 * inf."""
    found = kl_estimate(-INF, 0.0, -1.0, impl, kl_type=kl_type, unbiased=True)
    assert found == (0.0, 0.0, 0.0)


@IMPLS
@pytest.mark.parametrize("kl_type", KL_TYPES)
@pytest.mark.parametrize("unbiased", [False, True])
def test_a_masked_token_changes_no_other(impl, kl_type, unbiased):
    """The masked token takes every pair of extreme values."""
    pairs = [(new, base) for new in EXTREMES for base in EXTREMES]
    new = tensor(*(x for x, _ in pairs), -1.0).requires_grad_()
    base = tensor(*(x for _, x in pairs), -1.5)
    mask = torch.zeros_like(base)
    mask[-1] = 1
    ratio, kl = ratio_kl(new, base, base, mask, kl_type, unbiased=unbiased, impl=impl)
    (ratio + kl).sum().backward()
    assert new.grad is not None
    assert ratio[:-1].eq(1).all() and kl[:-1].eq(0).all() and new.grad[:-1].eq(0).all()
    alone = tensor(-1.0).requires_grad_()
    want = ratio_kl(alone, base[-1:], base[-1:], None, kl_type, unbiased=unbiased, impl=impl)
    sum(want).sum().backward()
    torch.testing.assert_close(torch.stack([ratio[-1], kl[-1]]), torch.stack([x[0] for x in want]))
    torch.testing.assert_close(new.grad[-1:], alone.grad)


@IMPLS
@pytest.mark.parametrize("options", [{}, {"eps_clip_c": 3.0}, {"kl_coef": 0.1, "kl_type": "k3"}], ids=str)
def test_a_masked_token_is_in_no_loss(impl, options):
    count = len(EXTREMES)
    columns = [tensor(*EXTREMES[i:], *EXTREMES[:i], value) for i, value in enumerate((-1.0, -1.2, 1.5))]
    new, mask = columns[0].requires_grad_(), tensor(*[0.0] * count, 1.0)
    weights, ref = tensor(*EXTREMES, 1.0), tensor(*EXTREMES, -1.1)
    given = {"tis_weights": weights, "ref_log_probs": ref, **options, "impl": impl}
    loss, metrics = grpo_loss(new, columns[1], columns[2], mask, 2.0, **given)
    loss.backward()
    assert new.grad is not None
    alone = tensor(-1.0).requires_grad_()
    given |= {"tis_weights": weights[-1:], "ref_log_probs": ref[-1:]}
    want, _ = grpo_loss(alone, columns[1][-1:], columns[2][-1:], mask[-1:], 2.0, **given)
    want.backward()
    torch.testing.assert_close(loss, want)
    assert new.grad[:-1].eq(0).all() and all(value.isfinite().all() for value in metrics.values())
    torch.testing.assert_close(new.grad[-1:], alone.grad)


@IMPLS
@pytest.mark.parametrize("advantage", [1.0, -1.0, 0.0])
@pytest.mark.parametrize("log_ratio", [-INF, -9999.0, -88.8, 79.0, 88.8, 9999.0, INF])
def test_a_counted_token_with_an_extreme_ratio(impl, advantage, log_ratio):
    """PPO's loss by hand: the ratio is at most exp(80), and has no gradient above."""
    new = tensor(log_ratio).requires_grad_()
    loss, _ = grpo_loss(new, tensor(0.0), tensor(advantage), tensor(1.0), 1.0, impl=impl)
    loss.backward()
    assert new.grad is not None
    ratio = math.exp(min(log_ratio, 80.0))
    held = min(max(ratio, 0.8), 1.2)
    assert loss.item() == pytest.approx(max(-ratio * advantage, -held * advantage), rel=1e-5)
    unclipped = -ratio * advantage >= -held * advantage
    wanted = -advantage * ratio if unclipped and log_ratio <= 80 else 0.0
    assert new.grad.item() == pytest.approx(wanted, rel=1e-5)


@IMPLS
@pytest.mark.parametrize("operator", [masked_sum, masked_mean, masked_whiten])
def test_masked_reductions_do_not_see_what_they_do_not_count(impl, operator):
    values = tensor(*EXTREMES, 1.0, 3.0).requires_grad_()
    mask = tensor(*[0.0] * len(EXTREMES), 1.0, 1.0)
    found = operator(values, mask, impl=impl)
    (found * found).sum().backward()
    alone = tensor(1.0, 3.0).requires_grad_()
    want = operator(alone, tensor(1.0, 1.0), impl=impl)
    (want * want).sum().backward()
    torch.testing.assert_close(found[-2:] if found.dim() else found, want)
    assert values.grad is not None and values.grad[:-2].eq(0).all()
    torch.testing.assert_close(values.grad[-2:], alone.grad)
