"""The rotary embedding of queries [T, A, D], for engines on CPUs.

vLLM's CPU kernel takes queries [T, A * D]. vLLM's latent attention passes [T, A, D], for which the kernel rotates the
wrong elements without an error. Such queries take vLLM's plain PyTorch form.
"""

from __future__ import annotations

import torch

_MARK = "takes_heads"


def install() -> None:
    """Choose the form by the dimensions of the queries. May run more than once."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    if hasattr(RotaryEmbedding.forward_cpu, _MARK):
        return
    kernel = RotaryEmbedding.forward_cpu

    def forward_cpu(
        self: RotaryEmbedding, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        form = kernel if query.dim() == 2 else RotaryEmbedding.forward_native
        return form(self, positions, query, key)

    setattr(forward_cpu, _MARK, True)
    # This replaces a method of vLLM on purpose: its kernel takes queries of two dimensions only.
    RotaryEmbedding.forward_cpu = forward_cpu  # type: ignore[method-assign]
