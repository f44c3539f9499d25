"""Compares weights that an engine keeps in blocks of fp8 with the plain weights of an update.

vLLM quantises the weights (`--quantization fp8_per_block`) when it starts and at each update. This file reads the
layouts of vLLM's kernels. A kernel that packs the weights is an error.

Shapes: O outputs, I inputs of a weight.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from slime.models.quantized.quantization import spread

_PLAIN_KERNELS = (
    "DequantizedOnCpu",
    "DeepGemmFp8BlockScaledMMKernel",
    "FlashInferFp8DeepGEMMDynamicBlockScaledKernel",
    "CutlassFp8BlockScaledMMKernel",
    "TritonFp8BlockScaledMMKernel",
    "BlockWiseTorchFP8ScaledMMLinearKernel",
)
"""vLLM's kernels that keep a weight as [O, I] and its scales as [blocks of O, blocks of I]. The first kernel belongs to
this project."""
_SLACK = 1e-5
"""Relative tolerance, because the division by a scale is rounded, too."""
_SMALLEST = 1e-4
"""Lower bound of a block's largest value in vLLM's quantisation."""


def is_quantized(module: object) -> bool:
    """Returns True if a linear layer of vLLM has its weight in fp8."""
    weight = getattr(module, "weight", None)
    return isinstance(weight, torch.Tensor) and weight.is_floating_point() and weight.element_size() == 1


class Quantized:
    """A piece of a live weight: `codes` fp8 [O, I], and `scales` fp32 [O, I], one scale per element. `loaded`: the
    dtype in which vLLM reads a weight before it quantises it."""

    def __init__(self, codes: torch.Tensor, scales: torch.Tensor, loaded: torch.dtype) -> None:
        self.codes, self.scales, self.loaded, self.shape = codes, scales, loaded, codes.shape

    def holds(self, want: torch.Tensor) -> bool:
        """Returns True if `codes * scales` is `want` rounded to fp8: no other fp8 value is nearer to `want /
        scales`."""
        exact = want.to(self.loaded).to(self.scales) / self.scales
        most = torch.finfo(self.codes.dtype).max
        nearest = exact.clamp(-most, most).to(self.codes.dtype).float()
        distance = (exact - self.codes.float()).abs()
        near = distance <= (exact - nearest).abs() + _SLACK * exact.abs()
        return bool((near & (exact.abs() <= most * (1 + _SLACK))).all())


def quantized_pieces(module: Any, sizes: Sequence[int]) -> Iterator[Quantized]:
    """Yields the weight of a layer with `sizes` rows per fused projection. Raises RuntimeError for a kernel that packs
    weights."""
    kernel = type(module.quant_method.fp8_linear).__name__
    codes, scales = module.weight.data, module.weight_scale_inv.data
    rows, columns = block = tuple(module.weight_block_size)
    blocks = torch.Size((-(-codes.shape[0] // rows), -(-codes.shape[1] // columns)))
    if kernel not in _PLAIN_KERNELS or scales.shape != blocks or scales.dtype != torch.float32:
        raise RuntimeError(
            "--check-weight-update-equal must have an engine that keeps fp8 weights as they are stored, got "
            f"{kernel}; leave the flag out"
        )
    elements = spread(_tight(codes, scales, block), block, codes.shape)
    for piece, own in zip(codes.split(list(sizes)), elements.split(list(sizes)), strict=True):
        yield Quantized(piece, own, module.orig_dtype)


def _tight(codes: torch.Tensor, scales: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """Returns `scales` with NaN for a block whose largest value uses less than half of fp8's range.

    Such a scale cannot belong to its block. The smallest scales of vLLM are exempt.
    """
    padding = (0, -codes.shape[1] % block[1], 0, -codes.shape[0] % block[0])
    padded = torch.nn.functional.pad(codes.float().abs(), padding)
    largest = padded.unflatten(1, (-1, block[1])).unflatten(0, (-1, block[0])).amax((1, 3))
    most = torch.finfo(codes.dtype).max
    used = (largest >= most / 2) | (scales <= 2 * _SMALLEST / most)
    return scales.where(used, torch.nan)
