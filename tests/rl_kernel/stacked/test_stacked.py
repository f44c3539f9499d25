"""Tests sums of stacked tensors into separate tensors."""

from __future__ import annotations

import pytest
import torch

from rl_kernel.stacked import add_stacked, addresses, is_addressable

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("size", [0, 5, 4096, 10_001])
def test_the_kernel_adds_the_bits_that_torch_adds(size, dtype):
    """The totals have other distances than the parts, and another order."""
    pytest.importorskip("triton")
    from rl_kernel.stacked import kernels

    torch.manual_seed(0)
    space = torch.randn(3, 2, 12_000, device=DEVICE)
    totals = [space[index, 0, :size] for index in (2, 0, 1)]
    parts = torch.randn(3, size, device=DEVICE).to(dtype)
    wanted = [total + part for total, part in zip(totals, parts, strict=True)]
    others = space[:, 1].clone(), space[:, 0, size:].clone()
    assert all(map(is_addressable, totals))
    kernels.add_stacked(addresses(totals), parts)
    assert all(map(torch.equal, totals, wanted))
    assert torch.equal(space[:, 1], others[0]) and torch.equal(space[:, 0, size:], others[1])


def test_tensors_that_no_kernel_can_add_to():
    """They are not contiguous, start between two units of 16 bytes, or are in 16 bits."""
    torch.manual_seed(0)
    parts = torch.randn(2, 4, 6, device=DEVICE)
    for totals in (
        torch.randn(2, 6, 4, device=DEVICE).mT.unbind(),
        torch.randn(2, 25, device=DEVICE)[:, 1:].unflatten(1, (4, 6)).unbind(),
        torch.randn(2, 4, 6, device=DEVICE).bfloat16().unbind(),
    ):
        assert not all(map(is_addressable, totals))
        wanted = [
            total + part.to(total.dtype)
            for total, part in zip(totals, parts.to(totals[0].dtype), strict=True)
        ]
        add_stacked(totals, parts.to(totals[0].dtype))
        assert all(map(torch.equal, totals, wanted))
