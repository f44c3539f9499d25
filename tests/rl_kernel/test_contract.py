"""The contract table names every public operator and holds together."""

import torch

import rl_kernel
from rl_kernel.contract import CONTRACTS, Tolerance, max_error


def test_every_public_operator_has_a_contract():
    assert sorted(CONTRACTS) == sorted(rl_kernel.__all__)
    for name in rl_kernel.__all__:
        doc = getattr(rl_kernel, name).__doc__
        assert doc and "`" in "".join(doc.split("\n\n")[:2]), f"{name} must state its formula"


def test_differentiable_operators_bound_their_gradients():
    for name, contract in CONTRACTS.items():
        assert set(contract.outputs) >= {"float32", "bfloat16"}, name
        assert bool(contract.differentiable) == bool(contract.gradients), name


def test_bound_and_error_by_hand():
    assert Tolerance(0.5, 0.1).bound(torch.tensor([-20.0, 3.0])) == 2.5
    assert Tolerance(0.5, 0.1).bound(torch.zeros(0)) == 0.5
    assert max_error(torch.tensor([1.0, 2.0]), torch.tensor([1.5, 2.0])) == 0.5
    assert max_error(torch.tensor([float("nan")]), torch.zeros(1)) == float("inf")
    assert max_error(torch.zeros(0), torch.zeros(0)) == 0.0
