"""torch's products of rounded matrices, for one weight: cuBLAS on Hopper GPUs.

cuBLAS reads the scales of both matrices as `rl_kernel.fp8.kernels` writes them. It adds the groups in float32.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import ScalingType, scaled_mm

from rl_kernel.fp8.kernels import Operand

_LEAST_CUDA = (12, 9)


@cache
def library_refusal(device: torch.device) -> str | None:
    """Returns the reason why torch's products cannot run on a device, or None if they can."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != 9:
        return "torch's products with such scales run on GPUs of compute capability 9.0"
    version = tuple(int(part) for part in (torch.version.cuda or "0.0").split(".")[:2])
    return None if version >= _LEAST_CUDA else "torch's products with such scales need CUDA 12.9"


def multiply_rows(left: Operand, right: Operand, dtype: torch.dtype) -> Tensor:
    """Computes `left @ right.T`: rows [M, K] and blocks [N, K] -> [M, N] in `dtype`."""
    return _multiply(left, right, ScalingType.BlockWise128x128, dtype)


def multiply_columns(left: Operand, right: Operand, dtype: torch.dtype) -> Tensor:
    """Computes `left @ right.T`: columns [N, M] and [K, M] -> [N, K] in `dtype`."""
    return _multiply(left, right, ScalingType.BlockWise1x128, dtype)


def _multiply(left: Operand, right: Operand, kind: ScalingType, dtype: torch.dtype) -> Tensor:
    out = scaled_mm(
        *(left.codes, right.codes.T, left.scales, ScalingType.BlockWise1x128, right.scales, kind),
        output_dtype=dtype,
    )
    return out[: left.rows]
