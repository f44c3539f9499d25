"""The head of a critic: one value per token instead of the logits of a vocabulary.

Every tensor- and context-parallel rank has the whole weight and the whole hidden states of its tokens, so that its
gradient needs no sum over tensor-parallel ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

PARAMETER = "value_head.weight"
"""Name of the weight in the model and in Megatron checkpoints."""


class ValueHead(nn.Module):
    """Computes `hidden.float() @ weight.float().T`, without a bias. The weight begins at 0: all values are 0 until it
    is trained."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, hidden))

    def forward(self, hidden: Tensor) -> Tensor:
        """Maps hidden [r, H] in the model's dtype to values [r] fp32. Differentiable."""
        return (hidden.float() @ self.weight.float().t())[:, 0]
