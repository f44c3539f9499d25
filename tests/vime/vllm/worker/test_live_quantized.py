"""Compares weights in blocks of fp8 with the plain weights of an update. In a real engine: e2e/test_engine_fp8.py."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from fp8_cases import BLOCK, RANGE, layer

from slime.models.quantized.quantization import dequantize, read_scheme, spread
from vime.vllm.worker.live_quantized import is_quantized, quantized_pieces

SIZES = [100, 60, 40]


@pytest.fixture
def weight() -> torch.Tensor:
    """Returns fp32 weights, like a trainer's, over two blocks of rows and two of columns, one of which is tiny."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(200, 130, generator=generator)
    weight[128:, 128:] *= 1e-6
    return weight


def test_pieces_hold_what_was_quantized(weight: torch.Tensor) -> None:
    linear = layer(weight.bfloat16(), SIZES)
    assert is_quantized(linear) and not is_quantized(SimpleNamespace(weight=weight))
    pieces = list(quantized_pieces(linear, SIZES))
    assert [piece.shape for piece in pieces] == [torch.Size((size, 130)) for size in SIZES]
    for piece, want in zip(pieces, weight.split(SIZES), strict=True):
        assert piece.holds(want)
    dequantized = torch.cat([piece.codes.float() * piece.scales for piece in pieces])
    scheme = read_scheme({"quantization_config": {"quant_method": "fp8", "weight_block_size": BLOCK}})
    assert scheme is not None
    expected = dequantize({"weight": linear.weight, "weight_scale_inv": linear.weight_scale_inv}, scheme)
    assert torch.equal(dequantized.bfloat16(), expected)


def test_one_code_that_is_not_the_nearest_is_found(weight: torch.Tensor) -> None:
    linear = layer(weight.bfloat16(), SIZES)
    code = linear.weight.view(torch.uint8)[170, 5]
    code += 1
    found = [
        piece.holds(want)
        for piece, want in zip(quantized_pieces(linear, SIZES), weight.split(SIZES), strict=True)
    ]
    assert found == [True, True, False]


@pytest.mark.parametrize("factor", [0.5, 4.0])
def test_scales_of_other_weights_are_found(weight: torch.Tensor, factor: float) -> None:
    """Codes for such scales are coarser than necessary, or clipped."""
    linear = layer(weight.bfloat16(), [200])
    linear.weight_scale_inv[0, 0] *= factor
    scales = spread(linear.weight_scale_inv, BLOCK, weight.shape)
    linear.weight = (weight.bfloat16().float() / scales).clamp(-RANGE, RANGE).to(torch.float8_e4m3fn)
    (piece,) = quantized_pieces(linear, [200])
    assert not piece.holds(weight)


def test_scales_of_powers_of_two_are_kept(weight: torch.Tensor) -> None:
    """DeepGEMM has such scales on some GPUs, up to twice as large."""
    linear = layer(weight.bfloat16(), [200])
    linear.weight_scale_inv = torch.exp2(linear.weight_scale_inv.log2().ceil())
    scales = spread(linear.weight_scale_inv, BLOCK, weight.shape)
    linear.weight = (weight.bfloat16().float() / scales).to(torch.float8_e4m3fn)
    (piece,) = quantized_pieces(linear, [200])
    assert piece.holds(weight) and not piece.holds(weight + 0.5)


def test_a_kernel_that_packs_weights_is_refused(weight: torch.Tensor) -> None:
    linear = layer(weight.bfloat16(), [200], kernel="MarlinFP8ScaledMMLinearKernel")
    with pytest.raises(RuntimeError, match="--check-weight-update-equal must .* got MarlinFP8"):
        list(quantized_pieces(linear, [200]))
