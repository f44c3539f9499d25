"""Makes linear layers as vLLM leaves them in blocks of fp8."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from slime.models.quantized.quantization import spread

BLOCK = (128, 128)
RANGE = torch.finfo(torch.float8_e4m3fn).max


def layer(
    weight: torch.Tensor, sizes: list[int], kernel: str = "CutlassFp8BlockScaledMMKernel"
) -> SimpleNamespace:
    """Makes a layer that is quantised over the projections that it fuses."""
    rows, columns = weight.shape
    padded = torch.nn.functional.pad(weight.float(), (0, -columns % 128, 0, -rows % 128)).abs()
    scales = padded.unflatten(1, (-1, 128)).unflatten(0, (-1, 128)).amax((1, 3)).clamp(1e-4) / RANGE
    codes = (weight.float() * (1 / spread(scales, BLOCK, weight.shape))).to(torch.float8_e4m3fn)
    return SimpleNamespace(
        weight=codes,
        weight_scale_inv=scales,
        weight_block_size=list(BLOCK),
        orig_dtype=torch.bfloat16,
        output_partition_sizes=sizes,
        quant_method=SimpleNamespace(fp8_linear=type(kernel, (), {})()),
    )
