"""Compares the quantisers of rl_kernel.microscaling with vLLM's references and compressed-tensors."""

from __future__ import annotations

import pytest
import torch
from compressed_tensors.compressors.nvfp4.helpers import pack_fp4_to_uint8, unpack_fp4_from_uint8
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import dequantize, quantize
from vllm.model_executor.layers.quantization.utils import mxfp8_utils, nvfp4_emulation_utils
from vllm_names import OLDEST

from rl_kernel.microscaling import mxfp8, nvfp4
from vime.vllm.versions import installed

SPREADS = (1e-6, 1e-3, 1.0, 300.0)


def sample(spread: float, seed: int = 0) -> torch.Tensor:
    """Returns rows of numbers with different sizes, a row of zeros and blocks of zeros."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(96, 256, generator=generator) * torch.rand(96, 1, generator=generator).exp() * spread
    x[3], x[4, :32], x[5, 7] = 0.0, 0.0, 40 * spread
    return x


@pytest.mark.skipif(installed() == OLDEST, reason="the oldest vLLM takes smaller scales")
@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mxfp8_is_vllms(spread: float, dtype: torch.dtype) -> None:
    x = sample(spread).to(dtype)
    codes, scales = mxfp8.quantize(x)
    wanted_codes, wanted_scales = mxfp8_utils._mxfp8_e4m3_quantize_torch(x)
    assert torch.equal(scales, wanted_scales)
    assert torch.equal(codes.view(torch.uint8), wanted_codes.view(torch.uint8))
    found = mxfp8.dequantize(codes, scales)
    assert torch.equal(found.bfloat16(), mxfp8_utils.dequant_mxfp8_to_bf16(codes, scales))
    assert torch.equal(mxfp8.rounded(x), found.to(dtype))


@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nvfp4_is_vllms(spread: float, dtype: torch.dtype) -> None:
    x = sample(spread).to(dtype)
    codes, scales, whole = nvfp4.quantize(x)
    wanted_values, wanted_scales = nvfp4_emulation_utils.ref_nvfp4_quant(x, whole, nvfp4.BLOCK)
    assert torch.equal(scales.float(), wanted_scales)
    differing = nvfp4_emulation_utils.break_fp4_bytes(codes, torch.float32) != wanted_values
    assert not differing.any(), differing.nonzero()
    found = nvfp4.dequantize(codes, scales, whole)
    wanted = (wanted_values.unflatten(-1, (-1, 16)) * (wanted_scales / whole)[..., None]).flatten(-2)
    assert torch.equal(found, wanted)
    assert torch.equal(nvfp4.rounded(x), found.to(dtype))


# Nothing is compiled: a trainer of an earlier test redirects requests for a CUDA device of this process to the CPU, and
# the compiler reads the properties of the current device.
@torch.compiler.set_stance("force_eager")
@pytest.mark.parametrize("spread", SPREADS)
def test_compressed_tensors_reads_nvfp4(spread: float) -> None:
    """The format of checkpoints with `nvfp4-pack-quantized`."""
    x = sample(spread)
    codes, scales, whole = nvfp4.quantize(x)
    values = unpack_fp4_from_uint8(codes, *x.shape, dtype=torch.float32)
    assert torch.equal(pack_fp4_to_uint8(values), codes)
    read = dequantize(x_q=values, scale=scales.float(), global_scale=whole, dtype=torch.float32)
    assert torch.equal(read, nvfp4.dequantize(codes, scales, whole))
    args = QuantizationArgs(num_bits=4, type="float", strategy="tensor_group", group_size=16, symmetric=True)
    written = quantize(x=x[5:], scale=scales[5:].float(), zero_point=None, global_scale=whole, args=args)
    assert (
        written == values[5:]
    ).float().mean() > 0.999  # it divides, and so breaks some ties in another way
