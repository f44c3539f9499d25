"""DeepGEMM's products of rounded matrices in bfloat16: an optional package for Hopper GPUs.

The package (`sgl-deep-gemm`, imported as `deep_gemm`) compiles its kernels with nvcc at their first use. It reads codes
and scales as `rl_kernel.fp8.kernels` writes them, without a copy. Experts need rows that start at multiples of 128.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rl_kernel.fp8.reference import GROUP

if TYPE_CHECKING:
    from rl_kernel.fp8.kernels import Operand, RowGroups

_BY_COLUMNS = (1, 1, GROUP)
"""Rows and columns that share a scale, of both operands, in the product for a weight's gradient."""


@cache
def deepgemm_refusal(device: torch.device) -> str | None:
    """Returns the reason why DeepGEMM cannot run on a device, or None if it can."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != 9:
        return "DeepGEMM's products run on GPUs of compute capability 9.0"
    if importlib.util.find_spec("deep_gemm") is None:
        return "install the package sgl-deep-gemm"
    home = Path(importlib.import_module("deep_gemm.cuda_helpers").find_cuda_home())
    nvcc = Path(os.environ.get("DG_JIT_NVCC_COMPILER") or home / "bin" / "nvcc")
    return None if nvcc.is_file() else f"DeepGEMM compiles with {nvcc}, which does not exist; set CUDA_HOME"


@cache
def _package() -> Any:
    return importlib.import_module("deep_gemm")


def multiply_rows(left: Operand, right: Operand) -> Tensor:
    """Computes `left @ right.T`: rows [M, K] and blocks [N, K] -> [M, N]."""
    out = torch.empty(
        left.codes.shape[0], right.codes.shape[0], dtype=torch.bfloat16, device=left.codes.device
    )
    _package().fp8_gemm_nt((left.codes, left.scales), (right.codes, right.by_block), out)
    return out if out.shape[0] == left.rows else out[: left.rows]


def multiply_expert_rows(left: Operand, right: Operand, spans: RowGroups, experts: int) -> Tensor:
    """Computes `left[rows of e] @ right[e].T` per expert: rows [G * 128, K] of `quantize(spaced=True)` and blocks
    [E * N, K] -> [M, N]."""
    codes = right.codes.view(experts, -1, right.codes.shape[1])
    width = codes.shape[1]
    scales = right.by_block.view(experts, width // GROUP, -1)
    out = torch.empty(len(left.codes), width, dtype=torch.bfloat16, device=codes.device)
    _package().m_grouped_fp8_gemm_nt_contiguous((left.codes, left.scales), (codes, scales), out, spans.owner)
    return out.index_select(0, spans.slot)


def add_columns(left: Operand, right: Operand, total: Tensor) -> None:
    """Adds `left @ right.T` to `total` [N, K] in float32, with one rounding: columns [N, M] and [K, M]."""
    _package().fp8_gemm_nt(
        (left.codes, left.scales), (right.codes, right.scales), total, c=total, recipe=_BY_COLUMNS
    )
