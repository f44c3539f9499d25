"""Compares `expert_rows`, `expert_dispatch` and `expert_combine` with hand-worked rows, the float64 formulas and
derivatives, in the reference and the kernels (in Triton's interpreter without a GPU)."""

import pytest
import torch

from rl_kernel import expert_combine, expert_dispatch, telemetry
from rl_kernel.contract import CONTRACTS, max_error
from rl_kernel.dispatch import Refused
from rl_kernel.ops.expert_rows import expert_rows
from rl_kernel.ops.expert_rows.cases import CASES, ExpertRowsCase, combine_formula, dispatch_formula

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture(params=["reference", "triton"])
def impl(request):
    if request.param == "triton":
        pytest.importorskip("triton")
    return request.param


def test_rows_by_hand():
    """Tokens 0 and 2 go to expert 1, tokens 0 and 1 to expert 2, and token 1 to expert 0, which is on another rank."""
    ids = torch.tensor([[2, 1], [0, 2], [1, 3]])
    rows, counts = expert_rows(ids, 1, 2)
    assert rows.tolist() == [[2, 0], [-1, 3], [1, -1]] and counts.tolist() == [2, 2]
    rows, counts = expert_rows(ids, 1, 2, descending=True)
    assert rows.tolist() == [[0, 2], [-1, 1], [3, -1]] and counts.tolist() == [2, 2]
    assert (rows.dtype, counts.dtype) == (torch.int32, torch.int32)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("descending", [False, True])
def test_rows_are_sorted_by_expert_then_token(case, descending):
    ids, here = case.ids(), case.experts if case.here is None else case.here
    rows, counts = expert_rows(ids, case.first, here, descending=descending)
    pairs = [
        ((-e if descending else e), t, k)
        for t, of_token in enumerate(ids.tolist())
        for k, e in enumerate(of_token)
        if case.first <= e < case.first + here
    ]
    wanted = torch.full_like(rows, -1)
    for row, (_, t, k) in enumerate(sorted(pairs)):
        wanted[t, k] = row
    assert torch.equal(rows, wanted)
    order = sorted(range(case.first, case.first + here), reverse=descending)
    assert counts.tolist() == [(ids == e).sum().item() for e in order]


def test_ids_outside_of_the_range_may_repeat():
    rows, counts = expert_rows(torch.tensor([[9, 9, 1], [9, 9, 9]]), 0, 2)
    assert rows.tolist() == [[-1, -1, 0], [-1, -1, -1]] and counts.tolist() == [0, 1]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_contract(case, dtype, impl):
    name = str(dtype).removeprefix("torch.")
    rows, counts = case.rows(DEVICE)
    total = int(counts.sum())
    leaves = [leaf.requires_grad_() for leaf in case.inputs(dtype, DEVICE)]
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    got, want = expert_dispatch(*leaves, rows, total, impl=impl), dispatch_formula(*wide, rows, total)
    for ours, theirs, leaf in zip(got, want, leaves, strict=True):
        assert ours.dtype == leaf.dtype and torch.equal(ours.double(), theirs)
    generator = torch.Generator(DEVICE).manual_seed(7)
    upstream = [torch.randn(x.shape, generator=generator, device=DEVICE).to(x.dtype) for x in got]
    grads = torch.autograd.grad(got, leaves, upstream)
    truths = torch.autograd.grad(want, wide, [x.double() for x in upstream])
    for ours, theirs, leaf in zip(grads, truths, leaves, strict=True):
        dtype_of = str(leaf.dtype).removeprefix("torch.")
        assert max_error(ours, theirs) <= CONTRACTS["expert_dispatch"].gradients[dtype_of].bound(theirs)
    y = upstream[0].requires_grad_()
    summed, truth = expert_combine(y, rows, impl=impl), combine_formula(y, rows)
    assert (summed.dtype, summed.shape) == (dtype, truth.shape)
    assert max_error(summed, truth) <= CONTRACTS["expert_combine"].outputs[name].bound(truth)
    back = torch.randn(summed.shape, generator=generator, device=DEVICE).to(dtype)
    (grad,) = torch.autograd.grad(summed, y, back)
    assert torch.equal(grad.double(), dispatch_formula(back, rows.new_zeros(rows.shape), rows, total)[0])


def test_gradcheck():
    case = ExpertRowsCase("few", 4, 3, 5, 2, first=1, here=3)
    rows, counts = case.rows()
    x, weights = (leaf.double().requires_grad_() for leaf in case.inputs())
    total = int(counts.sum())
    assert torch.autograd.gradcheck(lambda x, w: expert_dispatch(x, w, rows, total), [x, weights])
    y = torch.randn(total, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda y: expert_combine(y, rows), [y])


def test_a_layer_of_experts_is_the_weighted_sum(impl):
    """Experts multiply by their number, so the layer is x times the sum of weight x number."""
    case = ExpertRowsCase("layer", 6, 5, 4, 2)
    ids, (x, weights) = case.ids(DEVICE), case.inputs(device=DEVICE)
    rows, counts = expert_rows(ids, 0, 4)
    permuted, factors = expert_dispatch(x, weights, rows, 12, impl=impl)
    expert = torch.repeat_interleave(torch.arange(4, device=DEVICE), counts)
    out = expert_combine(permuted * (factors * expert)[:, None], rows, impl=impl)
    torch.testing.assert_close(out, x * (weights * ids).sum(1, keepdim=True))


def test_strided_inputs_and_gradients(impl):
    case = ExpertRowsCase("strided", 5, 12, 6, 3)
    rows, _ = case.rows(DEVICE)
    x, weights = case.inputs(device=DEVICE)
    wanted = expert_dispatch(x, weights, rows, 15, impl=impl)[0]
    turned = x.t().contiguous().t()
    part = torch.cat((torch.full((5, 3), torch.nan, device=DEVICE), x), 1)[:, 3:]
    for same in (turned, part):
        assert torch.equal(
            expert_dispatch(same, weights, rows.t().contiguous().t(), 15, impl=impl)[0], wanted
        )
    leaf = x.requires_grad_()
    expert_dispatch(leaf, weights, rows, 15, impl=impl)[0].sum().backward()  # the gradient is expanded
    assert torch.equal(leaf.grad, torch.full_like(leaf, 3.0))


def test_calls_are_counted_and_float64_is_refused():
    telemetry(reset=True)
    rows, _ = ExpertRowsCase("counted", 3, 4, 2, 1).rows()
    expert_combine(expert_dispatch(torch.zeros(3, 4), torch.zeros(3, 1), rows, 3)[0], rows)
    counts = telemetry(reset=True)
    assert [counts[name]["tokens"] for name in ("expert_dispatch", "expert_combine")] == [3, 3]
    pytest.importorskip("triton")
    with pytest.raises(Refused, match="expert_combine must run .*float64"):
        expert_combine(torch.zeros(3, 4, dtype=torch.float64, device=DEVICE), rows.to(DEVICE), impl="triton")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"rows": torch.zeros(2, 1, dtype=torch.int32)}, r"rows must have shape \[3, K\], got \[2, 1\]"),
        ({"rows": torch.zeros(3, 1)}, "rows must be one of int64, int32, got float32"),
        ({"weights": torch.zeros(3, 2)}, r"weights must have shape \[3, 1\], got \[3, 2\]"),
        ({"total": -1}, "total must be >= 0, got -1; pass the number of rows"),
        ({"x": torch.zeros(3)}, r"x must have shape \[T, H\], got \[3\]"),
    ],
)
def test_bad_input_is_named(changed, message):
    rows = torch.arange(3, dtype=torch.int32)[:, None]
    given = {"x": torch.zeros(3, 4), "weights": torch.zeros(3, 1), "rows": rows, "total": 3} | changed
    with pytest.raises(ValueError, match=message):
        expert_dispatch(**given)
