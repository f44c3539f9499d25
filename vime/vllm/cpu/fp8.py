"""Computes linear layers with weights in blocks of fp8, for engines on CPUs without matrix instructions for fp8.

vLLM's kernels for such layers on CPUs need AMX. This kernel is plain PyTorch. With blocks of 128 x 128 it rounds the
activations too, in groups of 1 x 128, as vLLM's kernels on GPUs do, so its log-probs have the errors of an engine on
GPUs. With other blocks it dequantises the weights and keeps the activations. It is slow, so it is for tests and small
models.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from rl_kernel.fp8.reference import GROUP, product, quantize_rows
from slime.models.quantized.quantization import QuantizationScheme, dequantize

if TYPE_CHECKING:
    from vllm.model_executor.kernels.linear.scaled_mm.cpu import CPUFp8BlockScaledMMKernel
    from vllm.platforms.interface import PlatformEnum


def with_plain_kernel(kernels: dict[PlatformEnum, list[type]]) -> dict[PlatformEnum, list[type]]:
    """Appends our kernel to the CPU kernels of vLLM's table. Changes the table in place, because other modules hold
    it."""
    from vllm.platforms.interface import PlatformEnum

    kernels[PlatformEnum.CPU].append(_kernel())
    return kernels


def _kernel() -> type[CPUFp8BlockScaledMMKernel]:
    from vllm.model_executor.kernels.linear.scaled_mm.cpu import CPUFp8BlockScaledMMKernel

    class DequantizedOnCpu(CPUFp8BlockScaledMMKernel):
        """`round(x) @ dequantize(weight, weight_scale_inv).T + bias`."""

        @classmethod
        def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
            return True, None

        def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
            """Leaves the weights as they are stored. Nothing is packed."""

        def apply_weights(
            self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None, **_: object
        ) -> torch.Tensor:
            block = (self.weight_group_shape.row, self.weight_group_shape.col)
            scales = getattr(layer, "weight_scale_inv", None)  # compressed-tensors has another name
            scales = layer.weight_scale if scales is None else scales
            if block == (GROUP, GROUP) and x.shape[-1] % GROUP == 0:
                rows = quantize_rows(x.flatten(0, -2))
                out = product(rows, (layer.weight, scales.float()), x.dtype).view(*x.shape[:-1], -1)
                return out if bias is None else out + bias
            scheme = QuantizationScheme("fp8", "float8_e4m3fn", block, "float32")
            weight = dequantize({"weight": layer.weight, "weight_scale_inv": scales}, scheme)
            return torch.nn.functional.linear(x, weight.to(x.dtype), bias)

    return DequantizedOnCpu
