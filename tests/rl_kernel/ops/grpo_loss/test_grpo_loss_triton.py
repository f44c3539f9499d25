"""Compares `grpo_loss` in Triton (in the interpreter without a GPU) with the float64 formula and the reference."""

import math

import pytest
import torch

import rl_kernel.ops.grpo_loss as module
from rl_kernel import grpo_loss, telemetry
from rl_kernel.contract import CONTRACTS, max_error
from rl_kernel.dispatch import Refused
from rl_kernel.ops.grpo_loss.cases import CASES, OPTIONS, GrpoLossCase, formula

pytest.importorskip("triton")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CONTRACT = CONTRACTS["grpo_loss"]
LEAVES = ("log_probs", "entropy")
# The interpreter truncates float32 to bfloat16 instead of rounding: twice the error.
SLACK = {torch.bfloat16: 1 if DEVICE == "cuda" else 2}


def run(op, columns, options, scale=1.0):
    """Returns loss, metrics, and the gradients of `scale * loss` for log_probs and entropy."""
    leaves = {name: columns[name].detach().clone().requires_grad_() for name in LEAVES if name in columns}
    loss, metrics = op({**columns, **leaves}, **options)
    grads = torch.autograd.grad(scale * loss, list(leaves.values()), allow_unused=True)
    return loss.detach(), metrics, dict(zip(leaves, grads, strict=True))


def triton(columns, **options):
    return grpo_loss(**columns, impl="triton", **options)


def reference(columns, **options):
    return grpo_loss(**columns, impl="reference", **options)


def wide(columns):
    return {n: v.double() if v.is_floating_point() else v for n, v in columns.items()}


def check(actual, truth, dtype, options):
    name = str(dtype).removeprefix("torch.")
    (loss, metrics, grads), (want, want_metrics, want_grads) = actual, truth
    assert loss.shape == () and loss.dtype == torch.float32
    assert max_error(loss, want) <= CONTRACT.outputs[name].bound(want)
    assert metrics.keys() == want_metrics.keys()
    for key, value in metrics.items():
        assert value.dtype == torch.float32 and not value.requires_grad
        assert max_error(value, want_metrics[key]) <= CONTRACT.outputs[name].bound(want_metrics[key]), key
    for key in LEAVES if options.get("entropy_coef") else LEAVES[:1]:
        bound = SLACK.get(dtype, 1) * CONTRACT.gradients[name].bound(want_grads[key])
        assert grads[key].dtype == dtype
        assert max_error(grads[key], want_grads[key]) <= bound, key


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_every_case_keeps_the_contract(case, options, dtype):
    columns = case.inputs(dtype, DEVICE)
    actual = run(triton, columns, options, scale=-3.0)
    check(actual, run(formula, wide(columns), options, scale=-3.0), dtype, options)
    check(actual, run(reference, columns, options, scale=-3.0), dtype, options)


@pytest.mark.parametrize("absent", [("ref_log_probs",), ("tis_weights",), ("ref_log_probs", "tis_weights")])
@pytest.mark.parametrize("tokens", [50, 4500])
def test_columns_that_are_left_out(absent, tokens):
    columns = GrpoLossCase("absent", tokens).inputs(device=DEVICE)
    columns = {name: value for name, value in columns.items() if name not in (*absent, "entropy")}
    check(run(triton, columns, {}), run(reference, columns, {}), torch.float32, {})


@pytest.mark.parametrize("denominators", [7, 2.5, torch.int64, torch.int32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("mask_dtype", [torch.uint8, torch.int64, torch.float16, torch.float64])
def test_denominators_and_masks_of_any_dtype(denominators, mask_dtype):
    columns, options = GrpoLossCase("dtypes", 50).inputs(device=DEVICE), OPTIONS["everything"]
    columns["mask"] = columns["mask"].to(mask_dtype)
    given = denominators
    columns["denominators"] = columns["denominators"].to(given) if isinstance(given, torch.dtype) else given
    check(run(triton, columns, options), run(reference, columns, options), torch.float32, options)


def test_columns_of_other_dtypes_than_the_log_probs():
    columns, options = GrpoLossCase("mixed", 50).inputs(device=DEVICE), OPTIONS["everything"]
    for name, dtype in (("old_log_probs", torch.float64), ("advantages", torch.bfloat16)):
        columns[name] = columns[name].to(dtype)
    columns["entropy"] = columns["entropy"].half()
    got, want = run(triton, columns, options), run(reference, columns, options)
    torch.testing.assert_close(got[0], want[0])
    assert got[2]["entropy"].dtype == torch.float16
    torch.testing.assert_close(got[2], want[2], rtol=1e-3, atol=1e-6)


def test_strided_columns():
    columns, options = GrpoLossCase("strided", 60).inputs(device=DEVICE), OPTIONS["everything"]
    strided = {name: value.repeat_interleave(2)[::2] for name, value in columns.items()}
    got, want = run(triton, strided, options), run(triton, columns, options)
    assert torch.equal(got[0], want[0]) and torch.equal(got[2]["log_probs"], want[2]["log_probs"])


def test_a_constant_log_prob_leaves_the_gradient_of_the_entropy():
    columns = GrpoLossCase("constant", 40).inputs(device=DEVICE)
    entropy = columns["entropy"].requires_grad_()
    loss, _ = triton(columns, entropy_coef=0.1)
    loss.backward()
    want = torch.where(columns["mask"], -0.1 / columns["denominators"], 0.0)
    torch.testing.assert_close(entropy.grad, want)
    assert not triton({**columns, "entropy": entropy.detach()})[0].requires_grad


def test_one_token_is_counted_by_hand():
    # Ratio 2 clipped at 1.3, A = 1, over 4; the masked neighbour holds NaN.
    new = torch.tensor([math.log(2), math.nan], device=DEVICE, requires_grad=True)
    constants = torch.zeros(2, device=DEVICE), torch.ones(2, device=DEVICE)
    mask = torch.tensor([1, 0], device=DEVICE)
    loss, metrics = grpo_loss(new, *constants, mask, 4.0, eps_clip_high=0.3, impl="triton")
    loss.backward()
    assert loss.item() == pytest.approx(-1.3 / 4, rel=1e-6) and new.grad.tolist() == [0.0, 0.0]
    assert metrics["pg_clipfrac"].tolist() == [1.0, 0.0]
    assert metrics["ratio"].tolist() == pytest.approx([2.0, 1.0], rel=1e-6)
    assert metrics["ppo_kl"].tolist() == pytest.approx([-math.log(2), 0.0], rel=1e-6)


def test_a_huge_ratio_of_a_clipped_token_has_a_zero_gradient():
    new = torch.tensor([0.0, 0.0], device=DEVICE, requires_grad=True)
    old = torch.tensor([-200.0, -200.0], device=DEVICE)
    advantages = torch.tensor([1.0, -1.0], device=DEVICE)
    loss, _ = grpo_loss(new, old, advantages, torch.ones_like(old), 1.0, eps_clip_c=3.0, impl="triton")
    loss.backward()
    assert loss.item() == pytest.approx(-1.2 + 3.0) and new.grad.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("impl", ["triton", "reference"])
@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan])
def test_an_unread_bad_denominator_shows_as_nan(monkeypatch, impl, bad):
    monkeypatch.setattr(module, "reads_values", lambda tensor: False)
    columns = GrpoLossCase("bad", 20).inputs(device=DEVICE)
    columns["mask"][:2] = torch.tensor([True, False])
    columns = {name: torch.nan_to_num(v) if v.is_floating_point() else v for name, v in columns.items()}
    for row, loss_is_nan in ((0, True), (1, False)):  # row 1 is not counted
        columns["denominators"] = torch.ones(20, device=DEVICE)
        columns["denominators"][row] = bad
        leaves = {name: columns[name].clone().requires_grad_() for name in LEAVES}
        loss, _ = grpo_loss(**columns | leaves, entropy_coef=0.1, impl=impl)
        loss.backward()
        assert loss.isnan().item() is loss_is_nan
        for leaf in leaves.values():
            assert leaf.grad.isnan().tolist() == [loss_is_nan, *[False] * 19]


def test_float64_is_refused_by_name():
    zeros = [torch.zeros(2, dtype=torch.float64, device=DEVICE) for _ in range(4)]
    with pytest.raises(Refused, match="grpo_loss must run .*float64"):
        grpo_loss(*zeros, 1.0, impl="triton")


def test_calls_are_counted():
    telemetry(reset=True)
    triton(GrpoLossCase("counted", 3).inputs(device=DEVICE))
    counts = telemetry(reset=True)["grpo_loss"]
    assert (counts["calls"], counts["tokens"]) == (1, 3) and counts["implementations"] == {"triton": 1}
