"""Compares masked reductions in Triton (in the interpreter without a GPU) with float64 and the reference."""

import math

import pytest
import torch
import torch.distributed as dist
from rank_processes import on_ranks

from rl_kernel import masked_mean, masked_sum, masked_whiten, telemetry
from rl_kernel.contract import CONTRACTS, max_error
from rl_kernel.dispatch import Refused
from rl_kernel.ops.masked.cases import CASES, MaskedCase, formula

kernels = pytest.importorskip("rl_kernel.ops.masked.kernels", reason="Triton is not installed")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
OPERATORS = {
    "masked_sum": (masked_sum, {}),
    "masked_mean": (masked_mean, {}),
    "masked_whiten": (masked_whiten, {}),
    "masked_whiten kept mean": (masked_whiten, {"shift_mean": False}),
}
every_operator = pytest.mark.parametrize(("op", "options"), OPERATORS.values(), ids=OPERATORS)
# The interpreter truncates float32 to bfloat16 instead of rounding: twice the error.
SLACK = {torch.bfloat16: 1 if DEVICE == "cuda" else 2}


def run(op, values, *args, **kwargs):
    """Returns the result and the gradient of its weighted sum."""
    leaf = values.detach().clone().requires_grad_()
    out = op(leaf, *args, **kwargs)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(5)).to(out.device)
    (out * weight).sum().backward()
    return out.detach(), leaf.grad


def formula_of(op):
    return lambda values, mask, **options: formula(op.__name__, values, mask, **options)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@every_operator
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_every_case_keeps_the_contract(case, op, options, dtype):
    contract, name = CONTRACTS[op.__name__], str(dtype).removeprefix("torch.")
    values, mask = case.inputs(dtype, DEVICE)
    got, grad = run(op, values, mask, impl="triton", **options)
    truth, want_grad = run(formula_of(op), values.double(), mask, **options)
    assert got.dtype == torch.float32 and got.shape == truth.shape and grad.dtype == dtype
    assert max_error(got, truth) <= contract.outputs[name].bound(truth)
    bound = SLACK.get(dtype, 1) * contract.gradients[name].bound(want_grad)
    assert max_error(grad, want_grad) <= bound
    assert max_error(got, op(values, mask, impl="reference", **options)) <= 2 * contract.outputs[name].bound(
        truth
    )


@every_operator
def test_nothing_counted(op, options):
    values = torch.full((5,), math.nan, device=DEVICE)
    out, grad = run(op, values, torch.zeros(5, device=DEVICE), impl="triton", **options)
    assert not out.any() and not grad.any()


@every_operator
def test_one_counted_entry(op, options):
    values, mask = torch.tensor([math.nan, 3.0], device=DEVICE), torch.tensor([0, 1], device=DEVICE)
    out = op(values, mask, impl="triton", **options)
    assert torch.equal(out, op(values, mask, impl="reference", **options))


@every_operator
@pytest.mark.parametrize(
    "mask_dtype", [torch.uint8, torch.int64, torch.float32, torch.bfloat16, torch.float64]
)
def test_a_mask_of_any_dtype(op, options, mask_dtype):
    values, mask = MaskedCase("masks", (70,)).inputs(device=DEVICE)
    want = run(op, values, mask, impl="triton", **options)
    other = mask.to(mask_dtype) * (1 if mask_dtype == torch.uint8 else -2)
    for got, same in zip(run(op, values, other, impl="triton", **options), want, strict=True):
        assert torch.equal(got, same)


@every_operator
def test_strided_values(op, options):
    values, mask = MaskedCase("strided", (12, 30)).inputs(device=DEVICE)
    turned = [x.t().contiguous().t() for x in (values, mask)]
    assert torch.equal(op(*turned, impl="triton", **options), op(values, mask, impl="triton", **options))


def test_cancelling_sums_are_exact():
    values = torch.tensor([1e8, 1.0, -1e8], device=DEVICE)
    assert masked_sum(values, torch.ones_like(values), impl="triton").item() == 1.0


def test_a_mean_far_above_the_deviation_keeps_the_digits():
    values = 1e4 + torch.randn(5000, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    mask = torch.ones_like(values)
    got, grad = run(masked_whiten, values, mask, impl="triton")
    want, want_grad = run(formula_of(masked_whiten), values.double(), mask != 0)
    contract = CONTRACTS["masked_whiten"]
    assert max_error(got, want) <= contract.outputs["float32"].bound(want)
    assert max_error(grad, want_grad) <= contract.gradients["float32"].bound(want_grad)


def test_longer_programs_give_the_same_sum(monkeypatch):
    values, mask = MaskedCase("long", (9001,)).inputs(device=DEVICE)
    want = run(masked_mean, values, mask, impl="triton")
    monkeypatch.setattr(kernels, "LONG_FROM", 0)
    for got, same in zip(run(masked_mean, values, mask, impl="triton"), want, strict=True):
        torch.testing.assert_close(got, same, rtol=1e-7, atol=0)


def test_many_partials_are_merged_in_steps(monkeypatch):
    values, mask = MaskedCase("steps", (3000,)).inputs(device=DEVICE)
    want = masked_whiten(values, mask, impl="triton")
    monkeypatch.setattr(kernels, "BLOCK", 64)
    monkeypatch.setattr(kernels, "MERGE_BLOCK", 16)
    torch.testing.assert_close(masked_whiten(values, mask, impl="triton"), want, rtol=1e-6, atol=1e-7)


@every_operator
def test_float64_is_refused_by_name(op, options):
    with pytest.raises(Refused, match=f"{op.__name__} must run .*float64"):
        op(
            torch.zeros(2, dtype=torch.float64, device=DEVICE),
            torch.ones(2, device=DEVICE),
            impl="triton",
            **options,
        )


@every_operator
def test_calls_are_counted(op, options):
    telemetry(reset=True)
    op(torch.zeros(2, 3, device=DEVICE), torch.ones(2, 3, device=DEVICE), impl="triton", **options)
    counts = telemetry(reset=True)[op.__name__]
    assert (counts["calls"], counts["tokens"]) == (1, 6) and counts["implementations"] == {"triton": 1}


PARTS = (40, 0, 23)


def on_rank(rank, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/init", rank=rank, world_size=len(PARTS))
    values, mask = MaskedCase("whole", (sum(PARTS),)).inputs()
    values, mask = values.split(PARTS)[rank], mask.split(PARTS)[rank]
    results = [
        op(values, mask, group=dist.group.WORLD, impl="triton", **options)
        for op, options in OPERATORS.values()
    ]
    torch.save(results, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.skipif(DEVICE == "cuda", reason="the interpreter's processes; NCCL is tested in tests/gpu")
def test_ragged_ranks_give_what_one_process_gives(tmp_path):
    on_ranks(on_rank, str(tmp_path), ranks=len(PARTS))
    ranks = [torch.load(tmp_path / f"{rank}.pt") for rank in range(len(PARTS))]
    values, mask = MaskedCase("whole", (sum(PARTS),)).inputs()
    for i, (op, options) in enumerate(OPERATORS.values()):
        want = op(values, mask, **options)
        if want.dim() == 0:
            assert all(torch.equal(rank[i], ranks[0][i]) for rank in ranks)
        got = torch.cat([rank[i] for rank in ranks]) if want.dim() else ranks[0][i]
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)
