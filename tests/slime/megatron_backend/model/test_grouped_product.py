"""Compares the joint product of the experts with one expert after the other, in float64, without a model
around it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from slime.megatron_backend.model.moe.grouped_product import GroupedProduct, RoundedProduct, expert_ends

SHARES = {
    "uneven": [5, 1, 7, 3],
    "empty-experts": [0, 9, 0, 0],
    "first-and-last": [4, 0, 0, 6],
    "no-rows": [0, 0, 0, 0],
}
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.07}


@pytest.fixture(params=SHARES)
def shares(request: pytest.FixtureRequest) -> list[int]:
    return SHARES[request.param]


def problem(shares: list[int], dtype: torch.dtype) -> tuple[Tensor, list[nn.Parameter], Tensor]:
    """Returns x [C, 16], weights of [24, 16] each, upstream gradient [C, 24]."""
    torch.manual_seed(0)
    x = torch.randn(sum(shares), 16).to(dtype).requires_grad_()
    weights = [nn.Parameter(torch.randn(24, 16).to(dtype)) for _ in shares]
    return x, weights, torch.randn(sum(shares), 24).to(dtype)


def one_by_one(shares: list[int], x: Tensor, weights: list[Tensor], upstream: Tensor) -> list[Tensor]:
    """Returns y, d_x and each weight's gradient, in float64."""
    leaf, leaves = (
        x.detach().double().requires_grad_(),
        [w.detach().double().requires_grad_() for w in weights],
    )
    y = torch.cat([rows @ w.T for rows, w in zip(leaf.split(shares), leaves, strict=True)])
    return [y.detach(), *torch.autograd.grad(y, [leaf, *leaves], upstream.double())]


def compare(got: list[Tensor], wanted: list[Tensor], dtype: torch.dtype) -> None:
    for ours, theirs in zip(got, wanted, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_products_and_gradients(shares, dtype):
    x, weights, upstream = problem(shares, dtype)
    y = GroupedProduct.apply(x, expert_ends(torch.tensor(shares), x.device), *weights)
    y.backward(upstream)
    assert y.dtype == x.grad.dtype == weights[0].grad.dtype == dtype
    wanted = one_by_one(shares, x, weights, upstream)
    compare([y, x.grad, *(w.grad for w in weights)], wanted, dtype)
    for share, weight in zip(shares, weights, strict=True):
        assert share or not weight.grad.any()


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_gradients_are_added_to_the_buffers_that_megatron_gives(shares, dtype):
    x, weights, upstream = problem(shares, dtype)
    for weight in weights:
        weight.main_grad, weight.grad_added_to_main_grad = torch.full(weight.shape, 3.0), False
    ends = expert_ends(torch.tensor(shares), x.device)
    for _ in range(2):  # two micro-batches
        GroupedProduct.apply(x, ends, *weights).backward(upstream)
        for weight in weights:
            assert weight.grad is not None and weight.grad_added_to_main_grad
            weight.grad = None  # Megatron's hook does the same
    wanted = one_by_one(shares, x, weights, upstream)
    added = [(weight.main_grad - 3.0) / 2 for weight in weights]
    compare([x.grad / 2, *added], wanted[1:], dtype)
    assert all(weight.main_grad.dtype == torch.float32 for weight in weights)


def test_what_needs_no_gradient_gets_none():
    shares = SHARES["uneven"]
    x, weights, upstream = problem(shares, torch.float32)
    ends = expert_ends(torch.tensor(shares), x.device)
    wanted = one_by_one(shares, x, weights, upstream)
    weights[1].requires_grad_(False)
    GroupedProduct.apply(x.detach(), ends, *weights).backward(upstream)
    assert x.grad is None and weights[1].grad is None
    compare([weights[i].grad for i in (0, 2, 3)], [wanted[2 + i] for i in (0, 2, 3)], torch.float32)
    for weight in weights:
        weight.requires_grad_(False)
    (d_x,) = torch.autograd.grad(GroupedProduct.apply(x, ends, *weights), x, upstream)
    compare([d_x], wanted[1:2], torch.float32)
    assert not GroupedProduct.apply(x.detach(), ends, *weights).requires_grad


def test_an_upstream_gradient_that_was_expanded():
    x, weights, _ = problem([2, 3], torch.float32)
    GroupedProduct.apply(x, expert_ends(torch.tensor([2, 3]), x.device), *weights).sum().backward()
    compare([w.grad for w in weights], one_by_one([2, 3], x, weights, torch.ones(5, 24))[2:], torch.float32)


def test_a_weight_changed_before_the_backward_is_an_error():
    """If the backward stacked the changed weight, it would give the gradient of another product."""
    x, weights, upstream = problem([2, 3], torch.float32)
    y = GroupedProduct.apply(x, expert_ends(torch.tensor([2, 3]), x.device), *weights)
    with torch.no_grad():
        weights[0].zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward(upstream)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_a_product_with_rounded_weights(shares, dtype):
    """y and d_x are those of the rounded weights. The gradient of a weight is that of its rounded weight, unchanged."""
    x, weights, upstream = problem(shares, dtype)
    for weight in weights:
        weight.main_grad, weight.grad_added_to_main_grad = torch.zeros(weight.shape), False

    def halves(stack: Tensor) -> Tensor:
        return (stack * 2).round() / 2

    y = RoundedProduct.apply(halves, x, expert_ends(torch.tensor(shares), x.device), *weights)
    y.backward(upstream)
    near = [halves(weight.detach()) for weight in weights]
    compare([y, x.grad, *(weight.grad for weight in weights)], one_by_one(shares, x, near, upstream), dtype)
    assert all(torch.equal(weight.main_grad.to(dtype), weight.grad) for weight in weights)
    assert all(weight.grad_added_to_main_grad for weight in weights)
    assert not torch.equal(near[0], weights[0])
