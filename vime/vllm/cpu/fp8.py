"""Computes linear layers with weights in blocks of fp8, for engines on CPUs without matrix instructions for fp8.

vLLM's kernels for such layers on CPUs need AMX. This kernel is plain PyTorch: it dequantises the weights for each
product and does not quantise the activations, as vLLM's kernel with AMX does. It is slow, so it is for tests and small
models.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from slime.models.quantization import QuantizationScheme, dequantize

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
        """`x @ dequantize(weight, weight_scale_inv).T + bias`."""

        @classmethod
        def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
            return True, None

        def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
            """Leaves the weights as they are stored. Nothing is packed."""

        def apply_weights(
            self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None, **_: object
        ) -> torch.Tensor:
            block = (self.weight_group_shape.row, self.weight_group_shape.col)
            scheme = QuantizationScheme("fp8", "float8_e4m3fn", block, "float32")
            scales = getattr(layer, "weight_scale_inv", None)  # compressed-tensors has another name
            stored = {
                "weight": layer.weight,
                "weight_scale_inv": layer.weight_scale if scales is None else scales,
            }
            weight = dequantize(stored, scheme)
            return torch.nn.functional.linear(x, weight.to(x.dtype), bias)

    return DequantizedOnCpu
