"""Compares the values to which rl_kernel.fp8 rounds with those of vLLM's functions for engines in fp8, bit for bit."""

from __future__ import annotations

import pytest
import torch

from rl_kernel.fp8 import reference


def draw(rows: int, columns: int) -> torch.Tensor:
    """Returns values as of activations: rows and columns of very different sizes."""
    generator = torch.Generator().manual_seed(5)
    sizes = torch.randn(rows, 1, generator=generator) * 3 + torch.randn(1, columns, generator=generator)
    return (torch.randn(rows, columns, generator=generator) * sizes.exp()).bfloat16()


@pytest.mark.parametrize("powers", [False, True], ids=["float32", "ue8m0"])
def test_activations_have_vllms_bits(powers: bool) -> None:
    """vLLM's plain function of `QuantFP8`, whose kernel for GPUs divides in the same way."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.quantization.input_quant_fp8 import QuantFP8
    from vllm.model_executor.layers.quantization.utils.quant_utils import GroupShape

    x = draw(50, 512)
    with set_current_vllm_config(VllmConfig()):
        vllm = QuantFP8(static=False, group_shape=GroupShape(1, 128), use_ue8m0=powers, compile_native=False)
    theirs, their_scales = vllm.forward_native(x)
    codes, scales = reference.quantize_rows(x, powers)
    assert torch.equal(scales, their_scales.float())
    assert torch.equal(codes.view(torch.uint8), theirs.view(torch.uint8))


def test_weights_have_vllms_scales_and_nearly_all_of_its_codes() -> None:
    """vLLM multiplies a weight by the rounded reciprocal of its scale, so a number between two codes may get the
    other code. Such a weight is rounded again if an update brings it."""
    from vllm.utils.deep_gemm import per_block_cast_to_fp8

    weight = draw(256, 384)
    # A trainer of an earlier test redirects the device, which vLLM's compiled function would read.
    with torch.compiler.set_stance("force_eager"):
        theirs, their_scales = per_block_cast_to_fp8(weight)
    codes, scales = reference.quantize_blocks(weight)
    assert torch.equal(scales, their_scales)
    differing = (codes.view(torch.uint8) != theirs.view(torch.uint8)).sum().item()
    assert differing < 0.001 * codes.numel()
