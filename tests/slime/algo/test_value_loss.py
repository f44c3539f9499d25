"""Compares the value loss and the explained variance with numbers by hand."""

from __future__ import annotations

import pytest
import torch

from slime.algo.value_loss import error_sums, explained_variance, value_loss


def test_value_loss_by_hand():
    values = torch.tensor([1.0, 2.0, 0.0, 5.0], requires_grad=True)
    old, returns = torch.tensor([0.5, 0.0, 0.1, 0.0]), torch.tensor([2.0, 0.5, 1.0, 0.0])
    weights = torch.tensor([0.5, 0.25, 0.25, 0.0])
    loss, sums, maxima = value_loss(values, old, returns, weights, value_clip=0.2)
    # The values are clipped to 0.7, 0.2, 0.0, 0.2: errors max(1, 1.69), max(2.25, 0.09), 1, and one token of weight
    # 0.
    assert loss.item() == pytest.approx(0.5 * 1.69 + 0.25 * 2.25 + 0.25)
    assert sums["value_loss"].item() == pytest.approx(loss.item())
    assert sums["value_clipfrac"].item() == pytest.approx(0.75) and not maxima
    loss.backward()
    # the clip holds the first value (no gradient); the second moves back to its return although it is clipped
    assert values.grad.tolist() == pytest.approx([0.0, 0.25 * 2 * 1.5, 0.25 * -2.0, 0.0])


def test_explained_variance_by_hand():
    returns, mask = torch.tensor([1.0, 2.0, 3.0, 9.0]), torch.tensor([1, 1, 1, 0])
    exact = error_sums(returns.clone(), returns, mask)
    constant = error_sums(torch.full((4,), 7.0), returns, mask)
    # The errors are 0.5, 0, -0.5, with variance 1/6 compared with 2/3.
    near = error_sums(torch.tensor([0.5, 2.0, 3.5, 0.0]), returns, mask)
    assert [explained_variance(x) for x in (exact, constant, near)] == pytest.approx([1.0, 0.0, 0.75])
    parts = [
        error_sums(torch.tensor([v]), r[None], m[None])
        for v, r, m in zip((0.5, 2.0, 3.5, 0.0), returns, mask, strict=True)
    ]
    assert explained_variance(sum(parts)) == pytest.approx(0.75)
    assert explained_variance(error_sums(returns, torch.ones(4), mask)) == 0.0
    assert explained_variance(torch.zeros(5, dtype=torch.float64)) == 0.0
