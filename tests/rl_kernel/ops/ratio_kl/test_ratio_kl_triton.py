"""Compares `ratio_kl` in Triton (in the interpreter without a GPU) with the float64 formula and the reference."""

import math

import pytest
import torch

from rl_kernel import ratio_kl, telemetry
from rl_kernel.contract import CONTRACTS, max_error
from rl_kernel.dispatch import Refused
from rl_kernel.ops.ratio_kl import KL_TYPES
from rl_kernel.ops.ratio_kl.cases import CASES, OPTIONS, RatioKlCase, formula

pytest.importorskip("triton")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CONTRACT = CONTRACTS["ratio_kl"]
# The interpreter truncates float32 to bfloat16 instead of rounding: twice the error.
SLACK = {torch.bfloat16: 1 if DEVICE == "cuda" else 2}


def run(op, columns, **kwargs):
    """Returns ratio, kl and the gradient of `(ratio + 2 * kl).sum()`."""
    columns = dict(columns)
    leaf = columns.pop("log_probs").detach().clone().requires_grad_()
    ratio, kl = op(leaf, *columns.values(), **kwargs)
    (ratio + 2 * kl).sum().backward()
    return ratio.detach(), kl.detach(), leaf.grad


def triton(*args, **kwargs):
    return ratio_kl(*args, impl="triton", **kwargs)


def reference(*args, **kwargs):
    return ratio_kl(*args, impl="reference", **kwargs)


def wide(columns):
    return {n: v.double() if v.is_floating_point() else v for n, v in columns.items()}


def check(actual, truth, dtype):
    name = str(dtype).removeprefix("torch.")
    assert [x.dtype for x in actual] == [torch.float32, torch.float32, dtype]
    bounds = [CONTRACT.outputs[name]] * 2 + [CONTRACT.gradients[name]]
    for got, want, tolerance, slack in zip(actual, truth, bounds, [1, 1, SLACK.get(dtype, 1)], strict=True):
        assert got.shape == want.shape
        assert max_error(got, want) <= slack * tolerance.bound(want)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: o["kl_type"] + "_unbiased" * o["unbiased"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_every_case_keeps_the_contract(case, options, dtype):
    columns = case.inputs(dtype, DEVICE)
    actual = run(triton, columns, **options)
    check(actual, run(formula, wide(columns), **options), dtype)
    check(actual, run(reference, columns, **options), dtype)


@pytest.mark.parametrize("mask_dtype", [torch.uint8, torch.int32, torch.int64, torch.bfloat16, torch.float64])
def test_a_mask_of_any_dtype_counts_what_is_not_zero(mask_dtype):
    columns = RatioKlCase("masked", 70).inputs(device=DEVICE)
    want = run(triton, columns, kl_type="k3")
    scale = 1 if mask_dtype == torch.uint8 else -3
    columns["mask"] = scale * columns["mask"].to(mask_dtype)
    for got, same in zip(run(triton, columns, kl_type="k3"), want, strict=True):
        assert torch.equal(got, same)


def test_without_mask_and_reference():
    columns = RatioKlCase("masked", 70).inputs(device=DEVICE)
    columns = {name: torch.nan_to_num(value.float()) for name, value in columns.items()}
    new = columns["log_probs"].requires_grad_()
    ratio, kl = triton(new, columns["old_log_probs"])
    want, _ = reference(new, columns["old_log_probs"])
    torch.testing.assert_close(ratio, want)
    assert torch.equal(kl, torch.zeros_like(want)) and not kl.requires_grad
    (grad,) = torch.autograd.grad(ratio.sum(), new)
    torch.testing.assert_close(grad, want.detach())


def test_strided_inputs_and_gradients():
    columns = RatioKlCase("strided", 60).inputs(device=DEVICE)
    strided = {name: value.repeat_interleave(2)[::2] for name, value in columns.items()}
    spread = torch.randn(60, 2, generator=torch.Generator().manual_seed(1)).to(DEVICE)[:, 0]
    grads = []
    for c in (columns, strided):
        leaf = c.pop("log_probs").detach().requires_grad_()
        ratio, kl = triton(leaf, *c.values(), kl_type="k2")
        assert ratio.is_contiguous()
        weight = spread if c is strided else spread.clone()
        grads += torch.autograd.grad([ratio, kl], leaf, [weight, weight])
    assert torch.equal(*grads)


@pytest.mark.parametrize("which", [0, 1], ids=["ratio", "kl"])
def test_one_output_alone_has_its_gradient(which):
    columns = RatioKlCase("alone", 60).inputs(device=DEVICE)
    grads = []
    for op in (triton, reference):
        c = dict(columns)
        leaf = c.pop("log_probs").detach().clone().requires_grad_()
        op(leaf, *c.values(), kl_type="k3", unbiased=True)[which].sum().backward()
        grads.append(leaf.grad)
    torch.testing.assert_close(*grads, rtol=2e-5, atol=1e-7)


@pytest.mark.parametrize("kl_type", KL_TYPES)
@pytest.mark.parametrize("unbiased", [False, True])
def test_extreme_log_ratios_are_those_of_the_reference(kl_type, unbiased):
    new = torch.tensor([0.0, -500.0, -1.0, -1.0, -1e-4], device=DEVICE)
    old = torch.tensor([-500.0, 0.0, -1.0, -82.0, 0.0], device=DEVICE)
    ref = torch.tensor([0.0, 0.0, 85.0, -3.0, -2e-4], device=DEVICE)
    columns = {"log_probs": new, "old_log_probs": old, "ref_log_probs": ref, "mask": new <= 0}
    got = run(triton, columns, kl_type=kl_type, unbiased=unbiased)
    want = run(reference, columns, kl_type=kl_type, unbiased=unbiased)
    for ours, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-9)


def test_tiny_log_ratios_keep_their_digits():
    lr = torch.tensor([1e-4, -3e-3, 0.1, -0.49, 0.51], device=DEVICE)
    zero = torch.zeros_like(lr)
    _, kl = triton(lr, zero, zero, None, "k3")
    want = torch.expm1(-lr.double()) + lr.double()
    torch.testing.assert_close(kl.double(), want, rtol=2e-6, atol=0)


@pytest.mark.parametrize("kl_type", KL_TYPES)
def test_a_counted_nan_is_not_hidden(kl_type):
    new = torch.tensor([math.nan, 0.0], device=DEVICE)
    ratio, kl = triton(new, torch.zeros_like(new), torch.zeros_like(new), None, kl_type)
    assert ratio.isnan().tolist() == kl.isnan().tolist() == [True, False]


def test_float64_is_refused_by_name():
    with pytest.raises(
        Refused, match="ratio_kl must run .*float64 inputs are computed by the reference only"
    ):
        triton(torch.zeros(2, dtype=torch.float64, device=DEVICE), torch.zeros(2, device=DEVICE))


def test_calls_are_counted():
    telemetry(reset=True)
    triton(torch.zeros(3, device=DEVICE), torch.zeros(3, device=DEVICE))
    counts = telemetry(reset=True)["ratio_kl"]
    assert (counts["calls"], counts["tokens"]) == (1, 3) and counts["implementations"] == {"triton": 1}
