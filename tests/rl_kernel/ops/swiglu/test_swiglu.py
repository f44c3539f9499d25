"""Compares `swiglu` with hand-worked numbers, the float64 formula and numerical derivatives."""

import math

import pytest
import torch

from rl_kernel import swiglu, telemetry
from rl_kernel.contract import CONTRACTS, max_error
from rl_kernel.dispatch import capabilities
from rl_kernel.mode import using
from rl_kernel.ops.swiglu.cases import CASES, SwigluCase, formula

CONTRACT = CONTRACTS["swiglu"]
BIG = (SwigluCase("many", (200,), 700), SwigluCase("many_large_gates", (200,), 700, spread=12.0))


def test_by_hand():
    """sigmoid(ln 3) = 3/4: silu(ln 3) = 0.75 ln 3; silu(-ln 3) = -ln 3 / 4; silu(0) = 0."""
    x = torch.tensor([[math.log(3), -math.log(3), 0.0, 2.0, 4.0, 5.0]])
    assert swiglu(x).tolist()[0] == pytest.approx([1.5 * math.log(3), -math.log(3), 0.0])


def test_gradient_by_hand():
    """At gate 0: silu is 0 with slope 1/2. At gate ln 3: silu is 0.75 ln 3, its slope 0.75 (1 + 0.25 ln 3)."""
    x = torch.tensor([0.0, math.log(3), 6.0, 2.0], requires_grad=True)
    (grad,) = torch.autograd.grad(swiglu(x), x, torch.tensor([1.0, 10.0]))
    slope = 0.75 * (1 + 0.25 * math.log(3))
    assert grad.tolist() == pytest.approx([3.0, 20 * slope, 0.0, 7.5 * math.log(3)])


@pytest.mark.parametrize("case", CASES + BIG, ids=lambda case: case.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_contract(case, dtype):
    name = str(dtype).removeprefix("torch.")
    x, upstream = case.inputs(dtype)
    leaf, wide = x.clone().requires_grad_(), x.double().requires_grad_()
    got, want = swiglu(leaf), formula(wide)
    assert (got.dtype, got.shape) == (dtype, want.shape)
    assert max_error(got, want) <= CONTRACT.outputs[name].bound(want)
    (grad,) = torch.autograd.grad(got, leaf, upstream)
    (truth,) = torch.autograd.grad(want, wide, upstream.double())
    assert max_error(grad, truth) <= CONTRACT.gradients[name].bound(truth)


@pytest.mark.parametrize(
    ("dtype", "finer"), [(torch.bfloat16, "float16"), (torch.float16, "float32")], ids=str
)
def test_a_coarser_dtype_breaks_the_contract(dtype, finer):
    x, _ = SwigluCase("many", (200,), 700).inputs(dtype)
    want = formula(x)
    assert max_error(swiglu(x), want) > CONTRACT.outputs[finer].bound(want)


def test_gradcheck():
    x, _ = SwigluCase("few", (2, 3), 4).inputs(torch.float64)
    assert torch.autograd.gradcheck(swiglu, [x.requires_grad_()])


def test_any_strides_and_upstream_gradients():
    wide, upstream = SwigluCase("strided", (6,), 12).inputs()
    spread = wide.repeat_interleave(2, 1)[:, ::2]
    turned = wide.t().contiguous().t()
    want = swiglu(wide)
    for x in (spread, turned):
        assert not x.is_contiguous()
        torch.testing.assert_close(swiglu(x), want)
    leaf = wide.requires_grad_()
    strided = upstream.repeat_interleave(3, 1)[:, ::3]
    grads = [torch.autograd.grad(swiglu(leaf), leaf, d)[0] for d in (upstream, strided)]
    torch.testing.assert_close(*grads)


def test_calls_are_counted_by_rows():
    telemetry(reset=True)
    swiglu(torch.zeros(3, 2, 8))
    swiglu(torch.zeros(0, 8))
    swiglu(torch.zeros(5, 0))
    counts = telemetry(reset=True)["swiglu"]
    assert (counts["calls"], counts["tokens"], counts["implementations"]) == (3, 6, {"reference": 3})
    assert sum(counts["fallbacks"].values()) == 3
    with using("off"):
        swiglu(torch.zeros(3, 8))
    assert telemetry(reset=True)["swiglu"]["fallbacks"] == {}


def test_capabilities():
    found = capabilities()["swiglu"]
    assert found["differentiable"] == ["x", "weights"] and found["deterministic"] and found["parallel"] == []
    assert found["outputs"]["bfloat16"]["relative"] == 2**-7


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.zeros(2, 3), r"x must have an even last dimension, got \[2, 3\]; put gate and values side by side"),
        (torch.zeros(()), r"x must have an even last dimension, got \[\]"),
        (torch.zeros(2, dtype=torch.int64), "x must be one of float32.* got int64"),
        ([1.0, 2.0], "x must be a tensor, got list"),
    ],
)  # fmt: skip
def test_bad_input_is_named(x, message):
    with pytest.raises(ValueError, match=message):
        swiglu(x)
