"""Compares `rotary` in Triton (in the interpreter without a GPU) with the float64 formula and the reference."""

import math

import pytest
import torch

from rl_kernel import rotary, telemetry
from rl_kernel.contract import CONTRACTS, max_error
from rl_kernel.dispatch import Refused
from rl_kernel.ops.rotary.cases import CASES, RotaryCase, formula

pytest.importorskip("triton")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CONTRACT = CONTRACTS["rotary"]
# The interpreter truncates float32 to bfloat16 instead of rounding, for angles and result: twice the error.
SLACK = {torch.bfloat16: 1 if DEVICE == "cuda" else 2}


def triton(x, cos, sin):
    return rotary(x, cos, sin, impl="triton")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_every_case_keeps_the_contract(case, dtype):
    name, slack = str(dtype).removeprefix("torch."), SLACK.get(dtype, 1)
    x, cos, sin, upstream = case.inputs(dtype, DEVICE)
    leaf, wide = x.detach().requires_grad_(), x.double().requires_grad_()
    got, want = triton(leaf, cos, sin), formula(wide, cos, sin, dtype)
    assert (got.dtype, got.shape) == (dtype, x.shape) and got.is_contiguous()
    assert max_error(got, want) <= slack * CONTRACT.outputs[name].bound(want)
    (grad,) = torch.autograd.grad(got, leaf, upstream)
    (truth,) = torch.autograd.grad(want, wide, upstream.double())
    assert (grad.dtype, grad.shape) == (dtype, x.shape)
    assert max_error(grad, truth) <= slack * CONTRACT.gradients[name].bound(truth)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_rounds_once_where_the_reference_rounds_thrice(dtype):
    x, cos, sin, _ = RotaryCase("many", 40, 4, 32).inputs(dtype, DEVICE)
    want = formula(x, cos, sin)
    ours, theirs = (max_error(rotary(x, cos, sin, impl=i), want) for i in ("triton", "reference"))
    # For float32 inputs, no finer dtype is in use.
    assert ours <= theirs + (2**-24 * want.abs().max().item() if dtype == torch.float32 else 0)


def test_views_of_a_fused_row_are_read_in_place():
    """Query, key and value are views of a row with the layer's layout: [T, groups, (A / G + 2) D]."""
    _, cos, sin, _ = RotaryCase("fused", 6, 1, 8).inputs(device=DEVICE)
    row = torch.randn(6, 2, 5 * 8, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    query, key, _ = row.split([3 * 8, 8, 8], dim=2)
    for part in (key, query[..., :8]):
        assert not part.is_contiguous()
        assert torch.equal(triton(part, cos, sin), triton(part.contiguous(), cos, sin))
    # The strides differ entirely, so it is copied.
    turned = row.transpose(1, 2)[:, :8].contiguous().transpose(1, 2)
    assert torch.equal(triton(turned, cos, sin), triton(turned.contiguous(), cos, sin))


def test_strided_gradients_and_angles():
    x, cos, sin, upstream = RotaryCase("strided", 6, 3, 8).inputs(device=DEVICE)
    leaf = x.requires_grad_()
    (grad,) = torch.autograd.grad(triton(leaf, cos, sin), leaf, upstream)
    beside = torch.full_like(upstream, math.nan)
    strided = (
        torch.cat((upstream, beside), 1)[:, :3],  # rows of wider rows
        upstream.transpose(0, 1).contiguous().transpose(0, 1),  # heads are the outer dimension
        upstream.repeat_interleave(2, 2)[..., ::2],  # neither layout
    )
    for same in strided:
        assert not same.is_contiguous()
        assert torch.equal(torch.autograd.grad(triton(leaf, cos, sin), leaf, same)[0], grad)
    spread = [table.repeat_interleave(2, 2)[..., ::2] for table in (cos, sin)]
    assert torch.equal(triton(x, *spread), triton(x, cos, sin))
    (ones,) = torch.autograd.grad(triton(leaf, cos, sin), leaf, torch.ones_like(upstream))
    assert torch.equal(torch.autograd.grad(triton(leaf, cos, sin).sum(), leaf)[0], ones)


def test_angles_are_rounded_to_the_dtype_of_x_first():
    x, cos, sin, _ = RotaryCase("rounded", 20, 2, 16).inputs(torch.float16, DEVICE)
    assert torch.equal(triton(x, cos, sin), triton(x, cos.half(), sin.half()))
    assert not torch.equal(cos.half().float(), cos)


def test_a_nan_stays_in_its_pair():
    x, cos, sin, _ = RotaryCase("nan", 2, 2, 6).inputs(device=DEVICE)
    x[1, 0, 4] = math.nan
    found = triton(x, cos, sin).isnan()
    assert found.sum() == 2 and found[1, 0, 1] and found[1, 0, 4]


def test_saves_the_angles_only():
    kept = []
    x, cos, sin, _ = RotaryCase("saved", 4, 2, 8).inputs(device=DEVICE)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.data_ptr()) or t, lambda t: t):
        triton(x.requires_grad_(), cos, sin)
    assert kept == [cos.data_ptr(), sin.data_ptr()]


@pytest.mark.parametrize("which", ["x", "cos"])
def test_float64_is_refused_by_name(which):
    x, cos, sin, _ = RotaryCase("wide", 2, 1, 4).inputs(device=DEVICE)
    given = {"x": x, "cos": cos, "sin": sin}
    given[which] = given[which].double()
    with pytest.raises(Refused, match="rotary must run .*float64 inputs are computed by the reference only"):
        triton(**given)


def test_calls_are_counted():
    telemetry(reset=True)
    x, cos, sin, _ = RotaryCase("counted", 5, 3, 4).inputs(device=DEVICE)
    triton(x, cos, sin)
    counts = telemetry(reset=True)["rotary"]
    assert (counts["calls"], counts["tokens"]) == (1, 5) and counts["implementations"] == {"triton": 1}


def test_angles_from_a_table_have_the_bits_of_given_ones():
    """Positions come in any order, as in an engine."""
    from rl_kernel.ops.rotary import kernels

    x = torch.randn(5, 3, 16, device=DEVICE)
    cos, sin = torch.rand(2, 9, 1, 8, device=DEVICE)
    places = torch.tensor([7, 0, 8, 0, 3], device=DEVICE)
    found = kernels.rotate(x, cos, sin, back=False, positions=places)
    assert torch.equal(found, kernels.rotate(x, cos[places], sin[places], back=False))
