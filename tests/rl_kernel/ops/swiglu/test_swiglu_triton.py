"""Compares `swiglu` in Triton (in the interpreter without a GPU) with the float64 formula and the reference."""

import math

import pytest
import torch

from rl_kernel import swiglu, telemetry
from rl_kernel.contract import CONTRACTS, max_error
from rl_kernel.dispatch import Refused
from rl_kernel.ops.swiglu.cases import CASES, SwigluCase, formula

pytest.importorskip("triton")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CONTRACT = CONTRACTS["swiglu"]


def triton(x):
    return swiglu(x, impl="triton")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_every_case_keeps_the_contract(case, dtype):
    """The interpreter also keeps it: it truncates float32 to bfloat16, which is the error of two roundings."""
    name = str(dtype).removeprefix("torch.")
    x, upstream = case.inputs(dtype, DEVICE)
    leaf, wide = x.clone().requires_grad_(), x.double().requires_grad_()
    got, want = triton(leaf), formula(wide)
    assert (got.dtype, got.shape) == (dtype, want.shape) and got.is_contiguous()
    assert max_error(got, want) <= CONTRACT.outputs[name].bound(want)
    (grad,) = torch.autograd.grad(got, leaf, upstream)
    (truth,) = torch.autograd.grad(want, wide, upstream.double())
    assert (grad.dtype, grad.shape) == (dtype, x.shape)
    assert max_error(grad, truth) <= CONTRACT.gradients[name].bound(truth)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_no_worse_than_the_reference(dtype):
    """The kernel rounds once where the reference rounds twice; in float32 both are within a few units."""
    x, upstream = SwigluCase("many", (40,), 300).inputs(dtype, DEVICE)
    wide = x.double().requires_grad_()
    want = formula(wide)
    (truth,) = torch.autograd.grad(want, wide, upstream.double())
    errors = []
    for impl in ("triton", "reference"):
        leaf = x.clone().requires_grad_()
        got = swiglu(leaf, impl=impl)
        (grad,) = torch.autograd.grad(got, leaf, upstream)
        errors.append((max_error(got, want), max_error(grad, truth)))
    for ours, theirs, truths in zip(*errors, (want, truth), strict=True):
        assert ours <= theirs + 4 * 2**-24 * truths.abs().max().item()


@pytest.mark.parametrize("width", [1, 12, 2051])
def test_strided_inputs_and_gradients(width):
    """A part of a wider row is read without a copy. Inputs with other strides, and an expanded gradient, are copied."""
    x, upstream = SwigluCase("strided", (4,), width).inputs(device=DEVICE)
    beside = torch.full((4, 3), math.nan, device=DEVICE)
    part = torch.cat((beside, x, beside), 1)[:, 3:-3]
    spread, turned = x.repeat_interleave(2, 1)[:, ::2], x.t().contiguous().t()
    wanted = triton(x)
    for same in (part, spread, turned):
        assert torch.equal(triton(same), wanted)
    batched = x.view(2, 2, -1).transpose(0, 1)  # no single stride describes these rows
    assert torch.equal(triton(batched), wanted.view(2, 2, -1).transpose(0, 1))
    leaf = x.requires_grad_()
    (grad,) = torch.autograd.grad(triton(leaf), leaf, upstream)
    wide = torch.cat((upstream, beside), 1)[:, : upstream.shape[1]]
    for same in (wide, upstream.repeat_interleave(2, 1)[:, ::2], upstream.t().contiguous().t()):
        assert torch.equal(torch.autograd.grad(triton(leaf), leaf, same)[0], grad)
    (ones,) = torch.autograd.grad(triton(leaf), leaf, torch.ones_like(upstream))
    assert torch.equal(torch.autograd.grad(triton(leaf).sum(), leaf)[0], ones)


def test_extreme_gates():
    """Below -89, exp(-gate) is infinite in float32, and the result must be 0."""
    gate = torch.tensor([100.0, -100.0, -1e30, 3e38, 0.0], device=DEVICE)
    x = torch.cat((gate, torch.ones_like(gate))).requires_grad_()
    got = triton(x)
    assert got.tolist() == pytest.approx([100.0, 0.0, 0.0, 3e38, 0.0], rel=1e-6)
    (grad,) = torch.autograd.grad(got.sum(), x)
    assert grad[:5].tolist() == pytest.approx([1.0, 0.0, 0.0, 1.0, 0.5])


def test_a_nan_is_not_hidden():
    x = torch.tensor([[math.nan, 1.0, 1.0, 1.0], [1.0, 1.0, math.nan, 1.0]], device=DEVICE)
    assert triton(x).isnan().tolist() == [[True, False], [True, False]]


def test_saves_nothing_but_its_input():
    kept = []
    x = torch.ones(3, 8, device=DEVICE, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.data_ptr()) or t, lambda t: t):
        triton(x)
    assert kept == [x.data_ptr()]


def test_float64_is_refused_by_name():
    with pytest.raises(Refused, match="swiglu must run .*float64 inputs are computed by the reference only"):
        triton(torch.zeros(2, 2, dtype=torch.float64, device=DEVICE))


def test_calls_are_counted():
    telemetry(reset=True)
    triton(torch.zeros(3, 2, 4, device=DEVICE))
    counts = telemetry(reset=True)["swiglu"]
    assert (counts["calls"], counts["tokens"]) == (1, 6) and counts["implementations"] == {"triton": 1}
