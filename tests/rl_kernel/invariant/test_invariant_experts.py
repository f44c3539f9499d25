"""Tests layers of experts with the same bits in every batch, and on every number of ranks."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import silu

import rl_kernel.invariant as invariant

TOKENS, HIDDEN, WIDTH, EXPERTS, TOPK = 41, 48, 32, 7, 3


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


X, ROUTER = draw(TOKENS, HIDDEN), draw(EXPERTS, HIDDEN, seed=1) / 4
FIRST, SECOND = draw(EXPERTS, 2 * WIDTH, HIDDEN, seed=2) / 7, draw(EXPERTS, HIDDEN, WIDTH, seed=3) / 6


def choose(x: Tensor, normalised: bool = True) -> tuple[Tensor, Tensor]:
    logits = invariant.router_logits(x, ROUTER)
    ids = invariant.choose_experts(logits, TOPK)
    return ids, invariant.expert_weights(logits, ids, normalised=normalised)


def compute(x: Tensor) -> Tensor:
    ids, weights = choose(x)
    return invariant.sum_rows(*invariant.expert_outputs(x, ids, weights, FIRST, SECOND), x.dtype)


def test_the_sum_is_that_of_plain_pytorch() -> None:
    for normalised in (True, False):
        ids, weights = choose(X, normalised)
        scores = (X @ ROUTER.T).softmax(-1)
        best, wanted = scores.topk(TOPK)
        assert torch.equal(ids, wanted.sort().values)
        share = scores.gather(1, ids) / (best.sum(1, keepdim=True) if normalised else 1)
        torch.testing.assert_close(weights, share, rtol=0, atol=2e-7)
    ids, weights = choose(X)
    total = torch.zeros_like(X)
    for token in range(TOKENS):
        for expert, weight in zip(ids[token].tolist(), weights[token], strict=True):
            gate, up = (FIRST[expert] @ X[token]).chunk(2)
            total[token] += weight * (SECOND[expert] @ (silu(gate) * up))
    torch.testing.assert_close(compute(X), total, rtol=0, atol=2e-6)


def test_a_token_has_the_same_bits_alone_and_in_another_order() -> None:
    whole = compute(X)
    assert torch.equal(compute(X.flip(0)).flip(0), whole)
    assert torch.equal(torch.cat([compute(row) for row in X.split(1)]), whole)
    assert compute(X[:0]).shape == (0, HIDDEN)


def test_ranks_with_some_of_the_experts_have_the_bits_of_one_rank() -> None:
    """The ranks have 2, 1 and 4 experts. The order of the ranks does not matter, because their sum is exact."""
    ids, weights = choose(X)
    parts = []
    for first, last in ((0, 2), (2, 3), (3, 7)):
        mine = torch.where((ids >= first) & (ids < last), ids - first, -1)
        parts.append(
            invariant.fill_slots(
                *invariant.expert_outputs(X, mine, weights, FIRST[first:last], SECOND[first:last])
            )
        )
    for order in ((0, 1, 2), (2, 1, 0)):
        assert torch.equal(invariant.sum_slots(torch.stack([parts[i] for i in order]), X.dtype), compute(X))


def test_a_rank_whose_experts_no_token_has_adds_zero() -> None:
    ids, weights = choose(X)
    found = invariant.expert_outputs(X, torch.full_like(ids, -1), weights, FIRST, SECOND)
    assert found[0].shape == (0, HIDDEN)
    assert not invariant.fill_slots(*found).any() and not invariant.sum_rows(*found, X.dtype).any()
    assert invariant.spread_rows(X, found[1], 0).shape == (0, HIDDEN)


def test_equal_logits_choose_the_smaller_numbers() -> None:
    logits = torch.tensor([[1.0, 2.0, 1.0, 2.0, 1.0], [0.0, 0.0, 0.0, 0.0, 0.0]])
    assert invariant.choose_experts(logits, 3).tolist() == [[0, 1, 3], [0, 1, 2]]


def test_sigmoid_scores_are_those_of_plain_pytorch() -> None:
    """The bias takes part in the choice only. Without it, a part of the tokens would have other experts."""
    bias, upstream = draw(EXPERTS, seed=5) / 3, draw(TOKENS, TOPK, seed=6)
    x = X.clone().requires_grad_()
    logits = x @ ROUTER.T
    scores = logits.sigmoid()
    wanted_ids = (scores + bias).topk(TOPK).indices.sort().values
    assert (wanted_ids != scores.topk(TOPK).indices.sort().values).any()
    for normalised in (True, False):
        ids, weights = invariant.route(logits, TOPK, normalised=normalised, sigmoid=True, bias=bias)
        chosen = scores.gather(1, wanted_ids)
        wanted = chosen / chosen.sum(1, keepdim=True) if normalised else chosen
        assert torch.equal(ids, wanted_ids)
        torch.testing.assert_close(weights, wanted, rtol=0, atol=2e-7)
        found, plain = (
            torch.autograd.grad(made, logits, upstream, retain_graph=True)[0] for made in (weights, wanted)
        )
        torch.testing.assert_close(found, plain, rtol=0, atol=1e-6)
    _, scaled = invariant.route(logits, TOPK, normalised=False, sigmoid=True, bias=bias, scale=2.5)
    assert torch.equal(scaled, weights * 2.5)
    one, alone = invariant.route(logits, 1, normalised=True, sigmoid=True)
    torch.testing.assert_close(alone, scores.gather(1, one), rtol=0, atol=1e-7)
    assert torch.equal(one[:, 0], logits.argmax(1))


def test_sigmoid_scores_have_the_same_bits_alone_and_in_another_order() -> None:
    logits, bias = invariant.router_logits(X, ROUTER), draw(EXPERTS, seed=5)
    whole = invariant.route(logits, TOPK, normalised=True, sigmoid=True, bias=bias)
    rows = [invariant.route(row, TOPK, normalised=True, sigmoid=True, bias=bias) for row in logits.split(1)]
    turned = invariant.route(logits.flip(0), TOPK, normalised=True, sigmoid=True, bias=bias)
    for mine, single, other in zip(whole, zip(*rows, strict=True), turned, strict=True):
        assert torch.equal(torch.cat(single), mine) and torch.equal(other.flip(0), mine)


def test_gradients_of_the_router_are_plain() -> None:
    upstream = draw(TOKENS, TOPK, seed=4)
    ids, _ = choose(X)
    x, router = X.clone().requires_grad_(), ROUTER.clone().requires_grad_()
    weights = invariant.expert_weights(invariant.router_logits(x, router), ids, normalised=True)
    found = torch.autograd.grad(weights, (x, router), upstream)
    plain = (x @ router.T).gather(1, ids).softmax(-1)
    for mine, wanted in zip(found, torch.autograd.grad(plain, (x, router), upstream), strict=True):
        torch.testing.assert_close(mine, wanted, rtol=0, atol=1e-6)
