"""The contract table names every public operator and holds together."""

import pytest
import torch

import rl_kernel
from rl_kernel.contract import CONTRACTS, Tolerance, max_error

NO_OPERATORS = {"capabilities", "configure", "telemetry"}


def test_every_public_operator_has_a_contract():
    assert set(CONTRACTS) == set(rl_kernel.__all__) - NO_OPERATORS
    for name in CONTRACTS:
        doc = getattr(rl_kernel, name).__doc__
        assert doc and "`" in "".join(doc.split("\n\n")[:2]), f"{name} must state its formula"


def test_differentiable_operators_bound_their_gradients():
    for name, contract in CONTRACTS.items():
        assert set(contract.outputs) >= {"float32", "bfloat16"}, name
        assert bool(contract.differentiable) == bool(contract.gradients), name


def test_linear_operators_bound_every_rounding_of_the_logits():
    assert CONTRACTS["linear_logp"] == CONTRACTS["linear_token_loss"]
    contract = CONTRACTS["linear_logp"]
    # Half a unit in the last place of two logits just below 8: 2 * 2**-6 and 2 * 2**-9.
    assert contract.outputs["bfloat16"].bound(torch.zeros(0)) == pytest.approx(2 * 2**-6, rel=0.05)
    assert contract.outputs["float16"].bound(torch.zeros(0)) == pytest.approx(2 * 2**-9, rel=0.05)
    for name, roundoff in (("bfloat16", 2**-8), ("float16", 2**-11)):
        assert contract.gradients[name].relative > 3 * roundoff
        assert contract.gradients[name].relative > contract.outputs[name].absolute / 2


def test_bound_and_error_by_hand():
    assert Tolerance(0.5, 0.1).bound(torch.tensor([-20.0, 3.0])) == 2.5
    assert Tolerance(0.5, 0.1).bound(torch.zeros(0)) == 0.5
    assert max_error(torch.tensor([1.0, 2.0]), torch.tensor([1.5, 2.0])) == 0.5
    assert max_error(torch.tensor([float("nan")]), torch.zeros(1)) == float("inf")
    assert max_error(torch.zeros(0), torch.zeros(0)) == 0.0
