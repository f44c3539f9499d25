"""Tests the quantisers of MXFP8 and NVFP4 by their definitions. tests/vime/vllm compares them with vLLM."""

from __future__ import annotations

import pytest
import torch

from rl_kernel.microscaling import mxfp8, nvfp4


def sample() -> torch.Tensor:
    """Returns rows of numbers with different sizes, a row of zeros and blocks of zeros."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(96, 256, generator=generator) * torch.rand(96, 1, generator=generator).exp()
    x[3], x[4, :32], x[5, 7] = 0.0, 0.0, 40.0
    return x


def test_the_scale_of_mxfp8_is_the_smallest_that_fits() -> None:
    """Exact powers of two and their neighbours, where a logarithm may round to the wrong side."""
    exponents = torch.arange(-110, 110)
    exact = torch.ldexp(torch.full((220,), 448.0), exponents)
    above = torch.nextafter(exact, torch.tensor(torch.inf))
    for largest, more in ((exact, 0), (above, 1)):
        x = torch.zeros(220, 32)
        x[:, 5] = -largest
        codes, scales = mxfp8.quantize(x)
        assert torch.equal(scales[:, 0].int(), exponents.int() + 127 + more)
        assert codes.float().abs().amax() <= 448
    zeros = mxfp8.quantize(torch.zeros(1, 32))
    assert zeros[1].item() == 0 and torch.equal(mxfp8.dequantize(*zeros), torch.zeros(1, 32))


def test_the_codes_of_nvfp4_round_to_nearest_even() -> None:
    x = torch.tensor(
        [[0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, -0.25, -0.26, 0.74, 2.6, -5.1, -1.75, 0.1, 4.9]]
    )
    codes, scales, whole = nvfp4.quantize(x, torch.tensor(1.0))
    assert scales.float().item() == 1.0 and whole == 1
    wanted = [0.0, 1, 1, 2, 2, 4, 4, 6, 0, -0.5, 0.5, 3, -6, -2, 0, 4]
    assert nvfp4.dequantize(codes, scales, whole).tolist() == [wanted]


def test_errors_are_bounded() -> None:
    """Half a step of the codes, relative to the largest value of the block."""
    x = sample()
    for form, size, bound in ((mxfp8, 32, 2**-4), (nvfp4, 16, 0.27)):
        largest = x.unflatten(1, (-1, size)).abs().amax(-1).repeat_interleave(size, 1)
        assert ((form.rounded(x) - x).abs() <= bound * largest).all()
    assert torch.equal(nvfp4.rounded(torch.zeros(2, 16)), torch.zeros(2, 16))


@pytest.mark.parametrize(("form", "columns", "size"), [(mxfp8, 48, 32), (nvfp4, 24, 16)])
def test_a_part_of_a_block_is_an_error(form: object, columns: int, size: int) -> None:
    with pytest.raises(ValueError, match=rf"rows of whole blocks of {size} for .*got shape \[2, {columns}\]"):
        form.quantize(torch.zeros(2, columns))  # type: ignore[attr-defined]
