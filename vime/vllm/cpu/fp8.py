"""Linear layers with weights in blocks of fp8, for engines on CPUs without matrix instructions for fp8.

vLLM's kernels for such layers on CPUs need AMX. Here is one in plain PyTorch: it dequantises the weights for each
product and leaves the activations as they are, as vLLM's kernel with AMX does. It is slow, for tests and small models.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from slime.models.quantised import from_blocks

if TYPE_CHECKING:
    from vllm.model_executor.kernels.linear.scaled_mm.cpu import CPUFp8BlockScaledMMKernel

_MARK = "dequantises"


def install() -> None:
    """Add the kernel behind vLLM's own for CPUs. May run more than once."""
    from vllm.platforms import current_platform
    from vllm.platforms.interface import PlatformEnum

    if not current_platform.is_cpu():
        return
    try:
        from vllm.model_executor.kernels.linear import _POSSIBLE_FP8_BLOCK_KERNELS
    except ImportError:  # older versions have no such layers on CPUs
        return
    kernels = _POSSIBLE_FP8_BLOCK_KERNELS[PlatformEnum.CPU]
    if not any(hasattr(kernel, _MARK) for kernel in kernels):
        kernels.append(_kernel())


def _kernel() -> type[CPUFp8BlockScaledMMKernel]:
    from vllm.model_executor.kernels.linear.scaled_mm.cpu import CPUFp8BlockScaledMMKernel

    class DequantisedOnCpu(CPUFp8BlockScaledMMKernel):
        """`x @ from_blocks(weight, weight_scale_inv).T + bias`."""

        dequantises = True

        @classmethod
        def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
            return True, None

        def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
            """The weights stay as they are stored: nothing is packed."""

        def apply_weights(
            self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None, **_: object
        ) -> torch.Tensor:
            block = (self.weight_group_shape.row, self.weight_group_shape.col)
            weight = from_blocks(layer.weight, layer.weight_scale_inv, block, "weight")
            return torch.nn.functional.linear(x, weight.to(x.dtype), bias)

    return DequantisedOnCpu
