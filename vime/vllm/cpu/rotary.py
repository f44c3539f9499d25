"""Computes the rotary embedding of queries [T, A, D], for engines on CPUs.

vLLM's CPU kernel expects queries [T, A * D]. vLLM's latent attention passes [T, A, D], and the kernel then rotates the
wrong elements without an error. Such queries use vLLM's plain PyTorch function.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding


def register() -> None:
    """Registers a subclass of each rotary embedding that uses the CPU kernel, in vLLM's registry of custom operators.

    Embeddings that are already registered stay, such as those of --rlk-bitwise. Repeated calls are allowed.
    """
    from vllm.model_executor.custom_op import CustomOp, op_registry_oot
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    def forward_cpu(
        self: RotaryEmbedding, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        form = RotaryEmbedding.forward_cpu if query.dim() == 2 else RotaryEmbedding.forward_native
        return form(self, positions, query, key)

    import_module("vllm.model_executor.layers.rotary_embedding")  # defines the subclasses
    bases: list[type[RotaryEmbedding]] = [RotaryEmbedding, *_subclasses(RotaryEmbedding)]
    for base in bases:
        is_vllms = base.__module__.startswith("vllm.") and base.forward_cpu is RotaryEmbedding.forward_cpu
        if is_vllms and base.__name__ not in op_registry_oot:
            ours = type(base.__name__, (base,), {"forward_cpu": forward_cpu})
            CustomOp.register_oot(ours, name=base.__name__)


def _subclasses(base: type[RotaryEmbedding]) -> Iterator[type[RotaryEmbedding]]:
    for one in base.__subclasses__():
        yield one
        yield from _subclasses(one)
