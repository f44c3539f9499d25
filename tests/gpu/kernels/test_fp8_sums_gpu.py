"""Tests the unrounded products in fp8, which ranks add, on a GPU."""

from __future__ import annotations

import pytest
import torch

from rl_kernel import fp8

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("powers", [False, True], ids=["float32", "ue8m0"])
def test_unrounded_products_have_the_bits_of_linear(powers: bool) -> None:
    """A row has these bits in any batch, and rounding the unrounded sum gives the layer's output."""
    generator = torch.Generator("cuda").manual_seed(0)
    x, weight = (torch.randn(rows, 512, device="cuda", generator=generator).bfloat16() for rows in (300, 384))
    wide = fp8.multiply(x, weight, torch.float32, power_of_two=powers)
    assert torch.equal(wide.bfloat16(), fp8.linear(x, weight, power_of_two=powers, invariant=True))
    few = [0, 7, 299]
    alone = [fp8.multiply(x[i : i + 1], weight, torch.float32, power_of_two=powers) for i in few]
    assert torch.equal(wide[few], torch.cat(alone))
