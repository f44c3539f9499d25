"""Tests `swiglu` with a factor for each row, in the reference and in the kernels (in Triton's interpreter without a
GPU)."""

import pytest
import torch

from rl_kernel import swiglu
from rl_kernel.contract import CONTRACTS, max_error
from rl_kernel.ops.swiglu.cases import CASES, SwigluCase, formula

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CONTRACT = CONTRACTS["swiglu"]
ROWS = (SwigluCase("many", (40,), 300), SwigluCase("three_blocks", (3,), 5000))


@pytest.fixture(params=["reference", "triton"])
def impl(request):
    if request.param == "triton":
        pytest.importorskip("triton")
    return request.param


def factors(case, dtype=torch.float32):
    generator = torch.Generator(DEVICE).manual_seed(3)
    return torch.randn(case.rows, generator=generator, device=DEVICE).to(dtype)


@pytest.mark.parametrize("case", CASES + ROWS, ids=lambda case: case.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_contract(case, dtype, impl):
    x, upstream = case.inputs(dtype, DEVICE)
    leaves = [x.requires_grad_(), factors(case).requires_grad_()]
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    got, want = swiglu(*leaves, impl=impl), formula(wide[0]) * wide[1][..., None]
    name = str(dtype).removeprefix("torch.")
    assert (got.dtype, got.shape) == (dtype, want.shape)
    assert max_error(got, want) <= CONTRACT.outputs[name].bound(want)
    grads = torch.autograd.grad(got, leaves, upstream)
    truths = torch.autograd.grad(want, wide, upstream.double())
    for ours, theirs, leaf in zip(grads, truths, leaves, strict=True):
        assert ours.dtype == leaf.dtype
        assert max_error(ours, theirs) <= CONTRACT.gradients[name].bound(theirs)


def test_factors_of_another_dtype_and_stride(impl):
    case = SwigluCase("strided", (2, 3), 12)
    x, upstream = case.inputs(device=DEVICE)
    wanted = swiglu(x, factors(case, torch.bfloat16).float(), impl=impl)
    strided = factors(case, torch.bfloat16).t().contiguous().t().requires_grad_()
    got = swiglu(x, strided, impl=impl)
    assert torch.equal(got, wanted)
    (grad,) = torch.autograd.grad(got, strided, upstream)
    truth = (formula(x) * upstream.double()).sum(-1)
    assert grad.dtype == torch.bfloat16 and max_error(grad, truth) <= 2**-8 * truth.abs().max()


def test_gradcheck():
    x, _ = SwigluCase("few", (2, 3), 4).inputs(torch.float64)
    w = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(swiglu, [x.requires_grad_(), w])


def test_another_number_of_factors_is_an_error():
    with pytest.raises(ValueError, match=r"weights must have shape \[3\], got \[2\]"):
        swiglu(torch.zeros(3, 4), torch.zeros(2))
