"""The contract table names every public operator and is consistent."""

import ast
from pathlib import Path

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
    # The bound is half a unit in the last place of two logits just below 8: 2 * 2**-6 and 2 * 2**-9.
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


def functions_and_calls(folder: Path) -> tuple[dict[str, tuple[int, int]], list[tuple[str, str, int]]]:
    """Returns the autograd functions of a package, {class: (least, most) arguments of its forward after ctx}, and
    their `apply` calls, (file and line, class, arguments). Calls with unpacked arguments are left out."""
    counts: dict[str, tuple[int, int]] = {}
    calls: list[tuple[str, str, int]] = []
    for file in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                for part in node.body:
                    if isinstance(part, ast.FunctionDef) and part.name == "forward":
                        most = len(part.args.args) - 1
                        unbounded = part.args.vararg is not None
                        counts[node.name] = (most - len(part.args.defaults), 99 if unbounded else most)
            match node:
                case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr="apply"), args=given):
                    if not any(isinstance(one, ast.Starred) for one in given):
                        calls.append((f"{file.name}:{node.lineno}", name, len(given)))
    return counts, calls


def test_autograd_functions_are_applied_to_the_arguments_of_their_forward():
    """torch types `apply` as any call, so a type checker does not compare the arguments. Some calls run on a GPU
    only."""
    counts, calls = functions_and_calls(Path(rl_kernel.__file__).parent)
    known = [(place, name, given) for place, name, given in calls if name in counts]
    assert {"Swiglu", "Rotary", "_Linear"} <= {name for _, name, _ in known}
    wrong = [
        (place, name, given, counts[name])
        for place, name, given in known
        if not counts[name][0] <= given <= counts[name][1]
    ]
    assert not wrong, "arguments given, (least, most) that forward takes"
