"""Compares masked reductions in one process with hand-worked numbers and numerical derivatives."""

import math

import pytest
import torch

from rl_kernel import masked_mean, masked_sum, masked_whiten
from rl_kernel.contract import CONTRACTS, max_error

VALUES = torch.tensor([[1.0, math.nan, 3.0], [8.0, math.inf, math.nan]])
MASKS = [VALUES.isfinite().to(dtype) for dtype in (torch.bool, torch.int32, torch.float32)]


@pytest.mark.parametrize("mask", MASKS, ids=lambda mask: str(mask.dtype))
def test_by_hand(mask):
    # Counted: 1, 3, 8. Sum 12, mean 4, Bessel variance (9 + 1 + 16) / 2 = 13.
    assert masked_sum(VALUES, mask).item() == 12.0
    assert masked_mean(VALUES, mask).item() == 4.0
    white = masked_whiten(VALUES, mask)
    want = torch.tensor([[-3.0, 0.0, -1.0], [4.0, 0.0, 0.0]]) / math.sqrt(13)
    torch.testing.assert_close(white, want)
    torch.testing.assert_close(masked_whiten(VALUES, mask, shift_mean=False), want + 4 * (mask != 0))


def test_eps_is_added_to_the_variance():
    out = masked_whiten(torch.tensor([0.0, 2.0]), torch.ones(2), eps=2.0)
    assert out.tolist() == pytest.approx([-0.5, 0.5])


def test_nothing_and_one_entry():
    nothing, one = torch.zeros(3), torch.tensor([0, 1, 0])
    values = torch.tensor([1.0, 2.0, 3.0])
    assert masked_sum(values, nothing).item() == 0.0 and masked_mean(values, nothing).item() == 0.0
    assert masked_whiten(values, nothing).tolist() == [0.0, 0.0, 0.0]
    assert masked_whiten(values, one).tolist() == [0.0, 0.0, 0.0]
    assert masked_whiten(values, one, shift_mean=False).tolist() == [0.0, 2.0, 0.0]
    empty = torch.zeros(0)
    assert masked_sum(empty, empty).item() == 0.0 and masked_whiten(empty, empty).shape == (0,)


def test_cancelling_sums_are_exact():
    values = torch.tensor([1e8, 1.0, -1e8])
    assert masked_sum(values, torch.ones(3)).item() == 1.0


@pytest.mark.parametrize("op", [masked_sum, masked_mean, masked_whiten], ids=lambda op: op.__name__)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_contract(op, dtype):
    contract, name = CONTRACTS[op.__name__], str(dtype).removeprefix("torch.")
    generator = torch.Generator().manual_seed(0)
    values = (5 + torch.randn(1000, generator=generator)).to(dtype).requires_grad_()
    mask = torch.rand(1000, generator=generator) < 0.7
    exact = values.detach().double().requires_grad_()
    kept = exact[mask]
    want = {"masked_sum": kept.sum(), "masked_mean": kept.mean()}.get(
        op.__name__,
        torch.zeros(1000).double().masked_scatter(mask, (kept - kept.mean()) / (kept.var() + 1e-8).sqrt()),
    )
    got = op(values, mask)
    assert got.dtype == torch.float32
    assert max_error(got, want) <= contract.outputs[name].bound(want)
    assert torch.equal(got, op(values, mask))
    weight = torch.randn(want.shape, generator=generator)
    (got * weight).sum().backward()
    (want * weight).sum().backward()
    assert max_error(values.grad, exact.grad) <= contract.gradients[name].bound(exact.grad)


@pytest.mark.parametrize("op", [masked_sum, masked_mean, masked_whiten], ids=lambda op: op.__name__)
def test_gradcheck(op):
    values = torch.randn(6, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    mask = torch.tensor([1, 1, 0, 1, 1, 0])
    assert torch.autograd.gradcheck(lambda x: op(x, mask), [values])


def test_uncounted_entries_get_no_gradient():
    values = VALUES.clone().requires_grad_()
    (masked_whiten(values, MASKS[0]) * torch.arange(6.0).view(2, 3)).sum().backward()
    assert values.grad.isfinite().all()
    assert torch.equal(values.grad != 0, MASKS[0])


@pytest.mark.parametrize("op", [masked_sum, masked_mean, masked_whiten], ids=lambda op: op.__name__)
@pytest.mark.parametrize(
    ("values", "mask", "message"),
    [
        ([1.0], torch.ones(1), "values must be a tensor, got list"),
        (torch.ones(1).long(), torch.ones(1), "values must be one of float32.* got int64"),
        (torch.ones(2), torch.ones(3), r"mask must have shape \[2\], got \[3\]"),
        (torch.ones(2), torch.ones(2, device="meta"), "mask must be on cpu, got meta"),
    ],
)
def test_bad_input_is_named(op, values, mask, message):
    with pytest.raises(ValueError, match=message):
        op(values, mask)


def test_whiten_needs_a_positive_eps():
    with pytest.raises(ValueError, match=r"eps must be finite and be > 0, got 0.0"):
        masked_whiten(torch.ones(2), torch.ones(2), eps=0.0)


def test_a_group_takes_no_gradient(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/init", rank=0, world_size=1)
    try:
        values = torch.ones(2, requires_grad=True)
        with pytest.raises(ValueError, match=r"values must not require grad with a group.*values.detach"):
            masked_sum(values, torch.ones(2), group=torch.distributed.group.WORLD)
    finally:
        torch.distributed.destroy_process_group()
